//! A connection that many callers share, and that is replaced when it fails.
//!
//! redis' `ConnectionManager` would keep a connection after a timeout, as `RedisError::retry_method` says, and does not check
//! the role of the server.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::{ErrorKind, RedisError, RedisResult};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::connection::Connection;

/// A connection and its generation.
pub(crate) type Live = (Connection, u64);

/// The result of a task that connects; `None` when the task was cancelled or panicked.
type Connecting = Shared<BoxFuture<'static, Option<RedisResult<Live>>>>;

/// How long after its limit a task counts as stuck: its runtime may not be driven any more.
const GRACE: Duration = Duration::from_secs(1);

/// Holds one connection, or none until a caller needs it.
#[derive(Clone, Default)]
pub(crate) struct SharedConnection(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    generation: u64,
    attempt: Option<Attempt>,
    /// How many attempts there were.
    attempts: u64,
}

/// A task that connects; all callers wait for the same connection.
struct Attempt {
    number: u64,
    task: AbortHandle,
    /// When it counts as stuck.
    until: Instant,
    answer: Connecting,
}

impl Attempt {
    /// Whether the task may still answer. The task's handle says so: a flag would stay set when the task is cancelled, panics,
    /// or ends with its runtime.
    fn is_under_way(&self) -> bool {
        !self.task.is_finished() && Instant::now() < self.until
    }
}

impl SharedConnection {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one step, so a panic leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection; `connect` makes it if there is none, within `limit`.
    ///
    /// # Cancellation safety
    /// A separate task makes the connection: a caller that gives up does not take it from the others. If that task ends
    /// without an answer, because its runtime has ended or it has panicked, the caller starts another one, once.
    pub(crate) async fn get(
        &self,
        connect: impl Fn() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) -> RedisResult<Live> {
        for _ in 0..2 {
            let answer = {
                let mut state = self.state();
                if let Some(connection) = &state.connection {
                    return Ok((connection.clone(), state.generation));
                }
                self.attempt(&mut state, &connect, limit)
            };
            if let Some(connected) = answer.await {
                return connected;
            }
        }
        Err(RedisError::from((ErrorKind::Client, "the task that connects was cancelled or has panicked")))
    }

    /// Makes another connection in the background; the present one serves until then.
    pub(crate) fn renew(
        &self,
        generation: u64,
        connect: impl Fn() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) {
        let mut state = self.state();
        if state.generation == generation {
            // The task continues without a waiting caller.
            drop(self.attempt(&mut state, connect, limit));
        }
    }

    /// Waits for the connection that a task is making; `None` when there is no task, or it fails.
    pub(crate) async fn renewed(&self) -> Option<Live> {
        let answer = {
            let state = self.state();
            let attempt = state.attempt.as_ref().filter(|attempt| attempt.is_under_way())?;
            attempt.answer.clone()
        };
        answer.await?.ok()
    }

    fn attempt(
        &self,
        state: &mut State,
        connect: impl Fn() -> BoxFuture<'static, RedisResult<Connection>>,
        limit: Duration,
    ) -> Connecting {
        if let Some(attempt) = state.attempt.as_ref().filter(|attempt| attempt.is_under_way()) {
            return attempt.answer.clone();
        }
        state.attempts += 1;
        let (shared, connecting, number) = (self.clone(), connect(), state.attempts);
        let task = tokio::spawn(async move {
            let connected = tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| Err(too_late()));
            shared.connected(number, connected)
        });
        let (abort, until) = (task.abort_handle(), Instant::now() + limit + GRACE);
        let answer = async { task.await.ok() }.boxed().shared();
        state.attempt = Some(Attempt { number, task: abort, until, answer: answer.clone() });
        answer
    }

    /// Keeps the connection of an attempt, unless a later attempt has taken its place.
    fn connected(&self, number: u64, connected: RedisResult<Connection>) -> RedisResult<Live> {
        let mut state = self.state();
        if state.attempt.as_ref().is_none_or(|attempt| attempt.number != number) {
            return Err(too_late());
        }
        state.attempt = None;
        let connection = connected?;
        state.generation += 1;
        state.connection = Some(connection.clone());
        Ok((connection, state.generation))
    }

    /// Gives this connection to no further caller. Callers that have it may go on with it.
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
