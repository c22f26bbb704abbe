//! Takes every advisory lock that it sees, with a role that may only log in.

use std::time::{Duration, Instant};

use sqlx::{Connection, PgConnection, Row};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Error;

/// The number of sessions, each of which takes one lock at a time.
const SESSIONS: usize = 8;

/// How long a session waits for a lock, and how long it holds the lock.
const WAIT: &str = "SET lock_timeout = '500ms'";
const HOLD: Duration = Duration::from_millis(900);

/// The advisory locks of other roles in the current database.
const SEEN: &str = "SELECT classid::BIGINT, objid::BIGINT, objsubid::INT FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND pid NOT IN (SELECT pid FROM pg_stat_activity WHERE usename = current_user)
    ORDER BY random()";

/// Takes locks until the time is over. Returns the number of locks taken.
pub(super) async fn squat(port: u16, lasts: Duration) -> Result<u64, Error> {
    let until = Instant::now() + lasts;
    let url = format!("postgres://stranger@127.0.0.1:{port}/postgres");
    let mut sessions = JoinSet::new();
    for _ in 0..SESSIONS {
        let mut connection = PgConnection::connect(&url).await?;
        sessions.spawn(async move {
            sqlx::raw_sql(WAIT).execute(&mut connection).await?;
            let mut taken = 0;
            while Instant::now() < until {
                taken += u64::from(take(&mut connection).await?);
            }
            // The locks end with the session.
            connection.close().await?;
            Ok::<u64, sqlx::Error>(taken)
        });
    }
    let mut taken = 0;
    while let Some(session) = sessions.join_next().await {
        taken += session??;
    }
    Ok(taken)
}

/// Waits for one of the locks, which its owner releases before long, and holds it for a while.
async fn take(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let Some(row) = sqlx::query(SEEN).fetch_optional(&mut *connection).await? else {
        sleep(Duration::from_millis(1)).await;
        return Ok(false);
    };
    let (class, object, kind): (i64, i64, i32) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    // An advisory lock is one number of 64 bits, or two of 32.
    let taken = match kind {
        1 => sqlx::query("SELECT pg_advisory_lock($1)").bind(class << 32 | object).execute(&mut *connection).await,
        _ => {
            let query = sqlx::query("SELECT pg_advisory_lock($1, $2)").bind(class as i32).bind(object as i32);
            query.execute(&mut *connection).await
        }
    };
    if taken.is_ok() {
        sleep(HOLD).await;
        sqlx::query("SELECT pg_advisory_unlock_all()").execute(&mut *connection).await?;
    }
    Ok(taken.is_ok())
}
