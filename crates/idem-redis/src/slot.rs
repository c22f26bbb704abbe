//! A connection that many share, and that is made anew when it is of no more use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::{ErrorKind, RedisError, RedisResult};

use crate::connection::Connection;

/// A connection, and which one of those that there were it is.
pub(crate) type Live = (Connection, u64);

/// Holds one connection, or none until somebody needs it.
#[derive(Clone, Default)]
pub(crate) struct Slot(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    generation: u64,
    /// Somebody connects; the others wait for the same connection.
    attempt: Option<Shared<BoxFuture<'static, RedisResult<Live>>>>,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one step, so a panic leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection; `connect` makes it if there is none, within `limit`.
    ///
    /// # Cancellation safety
    /// It is made by a task of its own: whoever has no more time to wait does not take the connection from the others.
    pub(crate) async fn get(
        &self,
        connect: impl FnOnce() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) -> RedisResult<Live> {
        let attempt = {
            let mut state = self.state();
            if let Some(connection) = &state.connection {
                return Ok((connection.clone(), state.generation));
            }
            self.attempt(&mut state, connect, limit)
        };
        attempt.await
    }

    /// Makes another connection behind the present one, which serves until then.
    pub(crate) fn renew(
        &self,
        generation: u64,
        connect: impl FnOnce() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) {
        let mut state = self.state();
        if state.generation == generation {
            // The task goes on by itself.
            drop(self.attempt(&mut state, connect, limit));
        }
    }

    /// The connection that somebody is making, once it is made; `None` when nobody is, or it cannot be made.
    pub(crate) async fn renewed(&self) -> Option<Live> {
        let attempt = self.state().attempt.clone()?;
        attempt.await.ok()
    }

    fn attempt(
        &self,
        state: &mut State,
        connect: impl FnOnce() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) -> Shared<BoxFuture<'static, RedisResult<Live>>> {
        if let Some(attempt) = &state.attempt {
            return attempt.clone();
        }
        let (slot, connecting) = (self.clone(), connect());
        let task = tokio::spawn(async move {
            let connected = tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| Err(too_late()));
            let mut state = slot.state();
            state.attempt = None;
            let connection = connected?;
            state.generation += 1;
            state.connection = Some(connection.clone());
            Ok((connection, state.generation))
        });
        let attempt = async { task.await.unwrap_or_else(|error| Err(std::io::Error::other(error).into())) };
        let attempt = attempt.boxed().shared();
        state.attempt = Some(attempt.clone());
        attempt
    }

    /// Nobody shall be given this connection any more. Whoever has it may go on with it.
    pub(crate) fn discard(&self, generation: u64) {
        let mut state = self.state();
        if state.generation == generation {
            state.connection = None;
        }
    }
}

fn too_late() -> RedisError {
    RedisError::from((ErrorKind::Client, "no connection was made in time"))
}
