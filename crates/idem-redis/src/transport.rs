//! Sends exchanges to the servers: connections, deadlines and retries.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(feature = "deadpool")]
use deadpool::managed::Manager as _;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
#[cfg(feature = "deadpool")]
use redis::aio::ConnectionLike as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::time::Instant;

use crate::address::{self, Servers};
use crate::connection::{Asking, Connection};
use crate::error::{Failure, Unconnected};
#[cfg(feature = "deadpool")]
use crate::pool;
use crate::script::{Exchange, Question};
use crate::shared_connection::SharedConnection;

/// How often an exchange is tried; each is safe to send again. The connection may have ended since its last use, and then an
/// answer may be lost.
const ATTEMPTS: u32 = 3;

/// The minimum timeout for connecting: looking for a primary takes several round trips.
const LEAST_CONNECT: Duration = Duration::from_secs(2);

pub(crate) struct Transport {
    servers: Servers,
    shared: SharedConnection,
    /// The connections for exchanges that await replicas: each is blocked while it waits.
    waiting: Box<[SharedConnection]>,
    turn: AtomicUsize,
    timeout: Duration,
}

/// The reply to an exchange: one value for each command, and the number of replicas if those were too few.
pub(crate) struct Reply {
    pub(crate) values: Vec<Value>,
    pub(crate) too_few: Option<i64>,
    /// Whether the exchange was sent before as well, and may have been executed then.
    pub(crate) is_repeated: bool,
}

/// An error, and whether the writing command of the exchange succeeded.
struct Refusal {
    error: RedisError,
    has_written: bool,
}

impl From<RedisError> for Refusal {
    fn from(error: RedisError) -> Self {
        Self { error, has_written: false }
    }
}

/// An exchange for one server, or a command for every primary.
enum Message<'a> {
    Record(&'a Exchange<'a>),
    Everybody(&'a Cmd),
}

/// A connection that the call shares, or one that it has taken from the pool.
enum Held<'a> {
    Shared {
        connection: Connection,
        shared: &'a SharedConnection,
        generation: u64,
    },
    #[cfg(feature = "deadpool")]
    Pooled {
        connection: deadpool_redis::Connection,
        /// Another handle of it, which waits for as long as the store does.
        handle: MultiplexedConnection,
    },
}

impl Transport {
    pub(crate) fn new(servers: Servers, timeout: Duration, replica_connections: usize) -> Self {
        let waiting = std::iter::repeat_with(SharedConnection::default).take(replica_connections).collect();
        Self { servers, shared: SharedConnection::default(), waiting, turn: AtomicUsize::new(0), timeout }
    }

    /// A transport to the same servers with separate connections. The runtime that uses it first drives them.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.servers.beside_pool(), self.timeout, self.waiting.len().min(1))
    }

    /// The deadline of a verb that begins now.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Sends an exchange to the server that has its key, and awaits replicas if the exchange says so.
    ///
    /// # Cancellation safety
    /// Requests share a connection, and each answer is matched with its request. So a dropped future does not disturb the others.
    /// Whether its request had an effect is then unknown.
    pub(crate) async fn run(&self, exchange: &Exchange<'_>, deadline: Instant) -> Result<Reply, Failure> {
        self.ask(&Message::Record(exchange), deadline).await
    }

    /// Whether the servers are reached as a Cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(..))
    }

    /// The application's pool, if the servers are reached by one.
    #[cfg(feature = "deadpool")]
    pub(crate) fn pool(&self) -> Option<&deadpool_redis::Pool> {
        match &self.servers {
            Servers::Pool(pool) => Some(pool),
            _ => None,
        }
    }

    /// Sends a command to every primary, and returns all replies.
    pub(crate) async fn ask_all(&self, command: &Cmd) -> Result<Vec<Value>, Failure> {
        Ok(self.ask(&Message::Everybody(command), self.deadline()).await?.values)
    }

    async fn ask(&self, question: &Message<'_>, deadline: Instant) -> Result<Reply, Failure> {
        let mut was_sent = false;
        let mut attempts = 1;
        let mut asking = None;
        // Every attempt uses the same one: the server may have ended the other connections as well.
        let shared = self.connection_for(question);
        loop {
            let holding = self.hold(shared, attempts == ATTEMPTS);
            let mut held = match tokio::time::timeout_at(deadline, holding).await {
                Ok(Ok(held)) => held,
                Ok(Err(Unconnected::Server(error))) => return Err(Failure::NotConnected { error, was_sent }),
                #[cfg(feature = "deadpool")]
                Ok(Err(Unconnected::Pool(why, error))) => {
                    return Err(Failure::NotFromPool { why, error: Some(error), was_sent });
                }
                #[cfg(feature = "deadpool")]
                Err(_) if self.pool().is_some_and(pool::is_in_use) => {
                    return Err(Failure::NotFromPool { why: pool::IN_USE, error: None, was_sent });
                }
                Err(_) => return Err(Failure::NotConnectedInTime { timeout: self.timeout, was_sent }),
            };
            let asked_at = Instant::now();
            let limit = self.limit(attempts, asked_at, deadline);
            let Ok(answer) = tokio::time::timeout_at(limit, held.ask(question, asking.as_ref())).await else {
                if limit < deadline {
                    // Another server may have the slot of the key by now; a new connection finds out.
                    self.renew(held);
                    was_sent = true;
                    attempts = ATTEMPTS;
                    continue;
                }
                // The server may be slow, or never answer, so later callers get another connection. If connecting took most of
                // the timeout, the connection is not to blame, and stays.
                if asked_at.elapsed() >= self.timeout / 2 {
                    self.leave(held);
                }
                return Err(Failure::Timeout { timeout: self.timeout });
            };
            let error = match answer {
                Ok(mut reply) => {
                    reply.is_repeated = was_sent;
                    // A primary that has lost its replicas may have been replaced, and not know it yet.
                    if reply.too_few.is_some() {
                        self.renew(held);
                    }
                    return Ok(reply);
                }
                Err(Refusal { error, has_written }) => {
                    // The Cluster driver retries internally, and reports only the last error.
                    was_sent |= has_written || !is_refusal(&error) || self.is_cluster();
                    error
                }
            };
            // While a slot moves, or has no server for a moment, the exchange is sent again.
            if let (Servers::Cluster(..), Some(pause)) = (&self.servers, moving(&error)) {
                asking = asking_at(&error);
                if Instant::now() + pause < deadline {
                    tokio::time::sleep(pause).await;
                    continue;
                }
            }
            if !is_of_no_use(&error) {
                return Err(Failure::Failed { error, may_have_run: was_sent });
            }
            held.discard();
            if attempts == ATTEMPTS {
                return Err(Failure::Failed { error, may_have_run: was_sent });
            }
            attempts += 1;
        }
    }

    /// The time until which to wait for an answer. In a Cluster, half of the timeout is for a second try: a server that hangs
    /// may have been replaced, and clients get no notice of that.
    fn limit(&self, attempts: u32, asked_at: Instant, deadline: Instant) -> Instant {
        match self.servers {
            Servers::Cluster(..) if attempts < ATTEMPTS => deadline.min(asked_at + self.timeout / 2),
            _ => deadline,
        }
    }

    /// The shared connection for a message.
    fn connection_for(&self, question: &Message<'_>) -> &SharedConnection {
        match question {
            Message::Record(Exchange { replicas: Some(_), .. }) => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.waiting.len();
                self.waiting.get(turn).unwrap_or(&self.shared)
            }
            _ => &self.shared,
        }
    }

    /// Takes a connection from the pool, or uses the shared one. If `is_new`, waits for the one that a task is making, if any.
    async fn hold<'a>(&'a self, shared: &'a SharedConnection, is_new: bool) -> Result<Held<'a>, Unconnected> {
        #[cfg(feature = "deadpool")]
        if let Servers::Pool(pool) = &self.servers {
            let connection = pool.get().await.map_err(pool::refusal)?;
            let handle = pool::patient(MultiplexedConnection::clone(&connection), self.timeout);
            return Ok(Held::Pooled { connection, handle });
        }
        let renewed = if is_new { shared.renewed().await } else { None };
        let (connection, generation) = match renewed {
            Some(live) => live,
            None => shared.get(|| self.connect(), self.connect_limit()).await?,
        };
        Ok(Held::Shared { connection, shared, generation })
    }

    fn connect(&self) -> BoxFuture<'static, RedisResult<Connection>> {
        connect(self.servers.clone(), self.connect_limit()).boxed()
    }

    /// The timeout for connecting. It may exceed that of a verb, since all waiting callers share the attempt.
    fn connect_limit(&self) -> Duration {
        (self.timeout * 2).max(LEAST_CONNECT)
    }

    /// Abandons a connection on which no answer came. That of a Cluster has a connection to each server behind it, and most of
    /// them may be healthy. So it serves until another one has read the present slots.
    fn leave(&self, held: Held<'_>) {
        match held {
            held @ Held::Shared { connection: Connection::Cluster(_), .. } => self.renew(held),
            held => held.discard(),
        }
    }

    /// Makes another connection, which replaces this one when it is there.
    fn renew(&self, held: Held<'_>) {
        match held {
            Held::Shared { shared, generation, .. } => {
                shared.renew(generation, || self.connect(), self.connect_limit())
            }
            #[cfg(feature = "deadpool")]
            held @ Held::Pooled { .. } => held.discard(),
        }
    }
}

async fn connect(servers: Servers, limit: Duration) -> RedisResult<Connection> {
    // Each call sets a deadline, so the connection needs no response timeout.
    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(None);
    let client = match servers {
        Servers::One(client) => *client,
        Servers::Sentinel(sentinels) => address::primary(&sentinels).await?,
        Servers::Cluster(client, _) => return client.get_async_connection().await.map(Connection::Cluster),
        #[cfg(feature = "deadpool")]
        Servers::BesidePool(pool) => return primary(pool::patient(pool.manager().create().await?, limit)).await,
        #[cfg(feature = "deadpool")]
        // Each call takes its connection out of the pool.
        Servers::Pool(_) => return Err((ErrorKind::Client, "a pool makes its connections itself").into()),
    };
    primary(client.get_multiplexed_async_connection_with_config(&config).await?).await
}

/// Refuses a replica: its reads would be stale.
async fn primary(mut connection: MultiplexedConnection) -> RedisResult<Connection> {
    let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
    match role.first() {
        Some(Value::BulkString(role)) if role != b"master" => Err(replica()),
        _ => Ok(Connection::One(connection)),
    }
}

fn replica() -> RedisError {
    redis::make_extension_error("READONLY".to_owned(), Some("the server is a replica".to_owned()))
}

impl Held<'_> {
    async fn ask(&mut self, question: &Message<'_>, asking: Option<&Asking>) -> Result<Reply, Refusal> {
        match question {
            Message::Everybody(command) => {
                Ok(Reply { values: self.ask_all((*command).clone()).await?, too_few: None, is_repeated: false })
            }
            Message::Record(exchange) => match self.exchange(exchange.by_hash(), exchange, asking).await {
                // A server that was flushed, restarted or promoted does not know the script.
                Err(refusal) if refusal.error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    self.exchange(exchange.by_source(), exchange, asking).await
                }
                reply => reply,
            },
        }
    }

    async fn exchange(
        &mut self,
        commands: Vec<Cmd>,
        exchange: &Exchange<'_>,
        asking: Option<&Asking>,
    ) -> Result<Reply, Refusal> {
        let mut answers = self.send(commands, exchange.key, asking).await?;
        let too_few = exchange.replicas.and_then(|(asked_for, _)| {
            // A server that stops being the primary answers `WAIT` with an error.
            let acknowledged = match answers.pop() {
                Some(Value::Int(replicas)) => replicas,
                _ => 0,
            };
            (acknowledged < i64::from(asked_for)).then_some(acknowledged)
        });
        let values: Vec<RedisResult<Value>> = answers.into_iter().map(Value::extract_error).collect();
        let has_written = match exchange.question {
            Question::Commands { writing, .. } => values.get(writing).is_some_and(Result::is_ok),
            Question::Script(..) => false,
        };
        let values = values.into_iter().collect::<RedisResult<_>>();
        let values = values.map_err(|error| Refusal { error, has_written })?;
        Ok(Reply { values, too_few, is_repeated: false })
    }

    async fn send(&mut self, commands: Vec<Cmd>, key: &[u8], asking: Option<&Asking>) -> RedisResult<Vec<Value>> {
        match self {
            Self::Shared { connection, .. } => connection.send(commands, key, asking).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled { handle, .. } => {
                pool::in_database(handle.get_db(), commands, Connection::One(handle.clone()), key).await
            }
        }
    }

    async fn ask_all(&mut self, command: Cmd) -> RedisResult<Vec<Value>> {
        match self {
            Self::Shared { connection, .. } => connection.ask_all(command).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled { handle, .. } => Ok(vec![handle.send_packed_command(&command).await?.extract_error()?]),
        }
    }

    fn discard(self) {
        match self {
            Self::Shared { shared, generation, .. } => shared.discard(generation),
            #[cfg(feature = "deadpool")]
            Self::Pooled { connection, .. } => drop(deadpool_redis::Connection::take(connection)),
        }
    }
}

/// The pause before the slot is looked up again, if the error is about the slot.
fn moving(error: &RedisError) -> Option<Duration> {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Ask | ServerErrorKind::Moved) => Some(Duration::ZERO),
        ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Duration::from_millis(5)),
        ErrorKind::Server(ServerErrorKind::ClusterDown) => Some(Duration::from_millis(50)),
        _ => None,
    }
}

/// The server that an `ASK` redirect names.
fn asking_at(error: &RedisError) -> Option<Asking> {
    let is_asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    let (address, _slot) = error.redirect_node().filter(|_| is_asking)?;
    let (host, port) = address.rsplit_once(':')?;
    Some(Asking { host: host.to_owned(), port: port.parse().ok()? })
}

/// Whether another connection may succeed where this one failed: it has ended, or its server takes no writes any more.
fn is_of_no_use(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Io | ErrorKind::Parse | ErrorKind::ClusterConnectionNotFound => true,
        ErrorKind::Server(kind) => matches!(kind, ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown),
        _ => false,
    }
}

/// Whether the server refused before any write. A general error may come after a script's first write. So may a missing
/// permission, since each command of a script needs one.
fn is_refusal(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(kind) => !matches!(kind, ServerErrorKind::ResponseError | ServerErrorKind::NoPerm),
        ErrorKind::Extension => true,
        _ => false,
    }
}
