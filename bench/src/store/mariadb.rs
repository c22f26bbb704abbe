//! MariaDB: hand-written statements through the same driver, and the store.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use idem_mysql::{MySqlConfig, MySqlStore};
use idem_servers::MariaDb;
use sha2::{Digest, Sha256};
use sqlx::MySqlPool;
use sqlx::mysql::MySqlPoolOptions;

use super::crowd::{CLIENTS, crowd};
use crate::contest::{hold, per_second};
use crate::drive::{Work, driven};
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;

/// The connections of each contestant, which is the default of the store.
const CONNECTIONS: u32 = 16;

pub(crate) const TABLE: &str = "CREATE TABLE hand_records (id BINARY(32) NOT NULL PRIMARY KEY, state TINYINT NOT NULL, \
    fingerprint BINARY(32) NOT NULL, token BINARY(16) NOT NULL, expires_at BIGINT NOT NULL, status INT, response LONGBLOB) \
    ENGINE = InnoDB ROW_FORMAT = DYNAMIC";

pub(crate) async fn run(server: &MariaDb, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let store = MySqlStore::open(MySqlConfig::new(server.url())).await?;
    report.note(format!("MariaDB: {}", store.durability()));
    let maker = Maker::new(Arc::new(store));
    let hand = MySqlPoolOptions::new().max_connections(CONNECTIONS).connect(&server.url()).await?;
    sqlx::raw_sql(TABLE).execute(&hand).await?;
    let numbers = Arc::new(AtomicU64::new(0));
    for clients in [1, CLIENTS] {
        let hand = hand.clone();
        let by_hand = move |number| -> Work {
            let hand = hand.clone();
            Box::pin(async move { two_statements(&hand, number).await })
        };
        let by_hand = driven("by hand", clients, pace.turn, &numbers, by_hand);
        let idem = driven("idem", clients, pace.turn, &numbers, maker.cycles());
        let name = format!("MariaDB: acquire and settle, {}", crowd(clients));
        let outcome = hold(&name, pace.rounds, vec![by_hand, idem]).await?;
        // Alone, a verb takes two messages where a statement by hand takes one. Verbs that wait share them.
        if clients == CLIENTS {
            let what = "MariaDB cycles/s against hand-written statements through the same driver, 64 clients";
            report.judge(what, Goal::AtLeast(2.0), outcome.ratio("idem", "by hand", per_second));
        }
        report.add(outcome);
    }
    Ok(())
}

async fn two_statements(pool: &MySqlPool, number: u64) -> Result<(), Error> {
    let key = Sha256::digest(number.to_be_bytes()).to_vec();
    let token = uuid::Uuid::new_v4().as_bytes().to_vec();
    let insert = "INSERT INTO hand_records (id, state, fingerprint, token, expires_at) VALUES (?, 1, ?, ?, unix_timestamp() + 86400)";
    let insert = sqlx::query(insert).bind(&key).bind(vec![b'f'; 32]).bind(&token);
    insert.execute(pool).await?;
    let update =
        "UPDATE hand_records SET state = 2, status = 200, response = ? WHERE id = ? AND token = ? AND state = 1";
    let update = sqlx::query(update).bind(vec![b'x'; 512]).bind(&key).bind(&token);
    match update.execute(pool).await?.rows_affected() {
        1 => Ok(()),
        _ => Err(format!("key {number} was not settled").into()),
    }
}
