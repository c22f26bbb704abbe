//! A connection that many share, and that is made anew when it is of no more use.

use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::RedisResult;

use crate::connection::Connection;

/// Holds one connection, or none until somebody needs it.
#[derive(Default)]
pub(crate) struct Slot {
    live: Mutex<Live>,
    /// Held by whoever connects, so that the others wait for that connection.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Live {
    connection: Option<Connection>,
    generation: u64,
}

impl Slot {
    fn live(&self) -> MutexGuard<'_, Live> {
        // Every change is one step, so a panic leaves it whole.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection and which one it is; `connect` makes it if there is none, and is not polled otherwise.
    pub(crate) async fn get(
        &self,
        connect: impl Future<Output = RedisResult<Connection>>,
    ) -> RedisResult<(Connection, u64)> {
        if let Some(found) = self.found() {
            return Ok(found);
        }
        let _connecting = self.connecting.lock().await;
        if let Some(found) = self.found() {
            return Ok(found);
        }
        let connection = connect.await?;
        let mut live = self.live();
        live.generation += 1;
        live.connection = Some(connection.clone());
        Ok((connection, live.generation))
    }

    fn found(&self) -> Option<(Connection, u64)> {
        let live = self.live();
        live.connection.clone().map(|connection| (connection, live.generation))
    }

    /// Nobody shall be given this connection any more. Whoever has it may go on with it.
    pub(crate) fn discard(&self, generation: u64) {
        let mut live = self.live();
        if live.generation == generation {
            live.connection = None;
        }
    }
}
