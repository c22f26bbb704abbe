//! The application's pool: what the store does with its connections, and why it gave none.

use std::time::Duration;

use deadpool::managed::TimeoutType;
use deadpool_redis::{Pool, PoolError};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};

use crate::connection::Connection;
use crate::error::Unconnected;

pub(crate) const IN_USE: &str = "its connections are all in use, or Redis does not answer on them";

/// Whether no connection is left to take or to make.
pub(crate) fn is_in_use(pool: &Pool) -> bool {
    let status = pool.status();
    status.available == 0 && status.size >= status.max_size
}

/// Why the pool gave no connection.
pub(crate) fn refusal(error: PoolError) -> Unconnected {
    let why = match error {
        PoolError::Backend(error) => return Unconnected::Server(error),
        PoolError::Timeout(TimeoutType::Wait) => IN_USE,
        PoolError::Timeout(TimeoutType::Create | TimeoutType::Recycle) => {
            "Redis did not answer within the pool's timeout"
        }
        PoolError::Closed => "the application has closed it",
        PoolError::NoRuntimeSpecified => "it has timeouts and no runtime; set one when you build it",
        PoolError::PostCreateHook(_) => "one of its hooks failed",
    };
    Unconnected::Pool(why, error)
}

/// The database that the pool's URL names, and the one in which a connection leaves the pool. `None` when the server does not tell.
pub(crate) async fn databases(pool: &Pool) -> Option<(i64, i64)> {
    let mut connection = pool.get().await.ok()?;
    let about: String = redis::cmd("CLIENT").arg("INFO").query_async(&mut connection).await.ok()?;
    let selected = about.split(' ').find_map(|field| field.strip_prefix("db="))?;
    Some((connection.get_db(), selected.parse().ok()?))
}

/// A handle of a connection of the pool that waits for as long as its caller, who has a deadline. The application's handles keep
/// their timeout, which by default is 500 ms.
pub(crate) fn patient(mut handle: MultiplexedConnection, deadline: Duration) -> MultiplexedConnection {
    handle.set_response_timeout(deadline * 2);
    handle
}

/// Sends commands to a database. The application may have left a connection of its pool in another one.
pub(crate) async fn in_database(
    database: i64,
    mut commands: Vec<Cmd>,
    mut connection: Connection,
    key: &[u8],
) -> RedisResult<Vec<Value>> {
    let mut select = redis::cmd("SELECT");
    select.arg(database);
    commands.insert(0, select);
    let mut answers = connection.send(commands, key, None).await?;
    match answers.remove(0).extract_error() {
        // The application has the same login, so it cannot have selected another database.
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) || is_unknown(&error) => Ok(answers),
        selected => selected.map(|_| answers),
    }
}

/// Whether the server does not know the command, as after `rename-command`.
fn is_unknown(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("unknown command"))
}
