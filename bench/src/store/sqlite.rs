//! SQLite: hand-written statements through the same driver, and the store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use idem_sqlite::{SqliteConfig, SqliteStore};
use sha2::{Digest, Sha256};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};

use super::crowd::{CLIENTS, crowd};
use crate::contest::{hold, per_second, say};
use crate::drive::{Work, driven};
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let store =
        SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", folder.path().join("idem.db").display()))).await?;
    let maker = Maker::new(Arc::new(store));
    let hand = by_hand(&folder.path().join("hand.db")).await?;
    let numbers = Arc::new(AtomicU64::new(0));
    for (clients, least) in [(1, 1.0), (CLIENTS, 3.0)] {
        let hand = hand.clone();
        let by_hand = move |number| -> Work {
            let hand = hand.clone();
            Box::pin(async move { two_statements(&hand, number).await })
        };
        let by_hand = driven("by hand", clients, pace.turn, &numbers, by_hand);
        let idem = driven("idem", clients, pace.turn, &numbers, maker.cycles());
        let name = format!("SQLite: acquire and settle, {}", crowd(clients));
        let outcome = hold(&name, pace.rounds, vec![by_hand, idem]).await?;
        let what =
            format!("SQLite cycles/s against hand-written statements through the same driver, {}", crowd(clients));
        report.judge(&what, Goal::AtLeast(least), outcome.ratio("idem", "by hand", per_second));
        report.add(outcome);
    }
    Ok(())
}

/// A cycle whose statements first read under the write lock, as a caller that must decide does.
pub(crate) async fn limits(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let hand = by_hand(&folder.path().join("hand.db")).await?;
    let numbers = Arc::new(AtomicU64::new(0));
    let pool = hand.clone();
    let once = move |number| -> Work {
        let pool = pool.clone();
        Box::pin(async move { two_statements(&pool, number).await })
    };
    let looking = move |number| -> Work {
        let hand = hand.clone();
        Box::pin(async move { two_transactions(&hand, number).await })
    };
    let contestants = vec![
        driven("by hand", 1, pace.turn, &numbers, once),
        driven("a look before each write", 1, pace.turn, &numbers, looking),
    ];
    let outcome = hold("SQLite, at most: cycles, 1 client", pace.rounds, contestants).await?;
    say(&outcome, "a look before each write", "by hand", ("rate", per_second));
    report.add(outcome);
    Ok(())
}

async fn by_hand(file: &Path) -> Result<SqlitePool, Error> {
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // As durable as the store.
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(std::time::Duration::from_secs(30));
    // SQLite has one writer; more connections would only wait for each other.
    let hand = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
    let table = "CREATE TABLE records (key BLOB PRIMARY KEY, state INTEGER NOT NULL, fingerprint BLOB NOT NULL, \
        token BLOB NOT NULL, expires_at INTEGER NOT NULL, status INTEGER, response BLOB) WITHOUT ROWID";
    sqlx::query(table).execute(&hand).await?;
    Ok(hand)
}

/// Like [`two_statements`], with two exchanges with the connection's thread instead of each one.
async fn two_transactions(pool: &SqlitePool, number: u64) -> Result<(), Error> {
    let key = Sha256::digest(number.to_be_bytes()).to_vec();
    let token = uuid::Uuid::new_v4().as_bytes().to_vec();
    let mut connection = pool.acquire().await?;
    let look =
        "BEGIN IMMEDIATE; SELECT state, fingerprint, token, expires_at, status, response FROM records WHERE key = ?";
    sqlx::query(look).bind(&key).fetch_optional(&mut *connection).await?;
    let insert = "INSERT INTO records (key, state, fingerprint, token, expires_at) VALUES (?, 1, ?, ?, unixepoch() + 86400); COMMIT";
    sqlx::query(insert).bind(&key).bind(vec![b'f'; 32]).bind(&token).execute(&mut *connection).await?;
    sqlx::query(look).bind(&key).fetch_optional(&mut *connection).await?;
    let update = "UPDATE records SET state = 2, status = 200, response = ? WHERE key = ? AND token = ?; COMMIT";
    let update = sqlx::query(update).bind(vec![b'x'; 512]).bind(&key).bind(&token);
    // The COMMIT may count once more.
    match update.execute(&mut *connection).await?.rows_affected() {
        0 => Err(format!("key {number} was not settled").into()),
        _ => Ok(()),
    }
}

async fn two_statements(pool: &SqlitePool, number: u64) -> Result<(), Error> {
    let key = Sha256::digest(number.to_be_bytes()).to_vec();
    let token = uuid::Uuid::new_v4().as_bytes().to_vec();
    let insert = "INSERT INTO records (key, state, fingerprint, token, expires_at) VALUES (?, 1, ?, ?, unixepoch() + 86400) \
        ON CONFLICT DO NOTHING";
    let insert = sqlx::query(insert).bind(&key).bind(vec![b'f'; 32]).bind(&token);
    if insert.execute(pool).await?.rows_affected() != 1 {
        return Err(format!("key {number} was there already").into());
    }
    let update = "UPDATE records SET state = 2, status = 200, response = ? WHERE key = ? AND token = ? AND state = 1";
    let update = sqlx::query(update).bind(vec![b'x'; 512]).bind(&key).bind(&token);
    match update.execute(pool).await?.rows_affected() {
        1 => Ok(()),
        _ => Err(format!("key {number} was not settled").into()),
    }
}
