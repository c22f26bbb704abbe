//! The way to the servers: connections, deadlines, and what is sent again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(feature = "deadpool")]
use deadpool::managed::Manager as _;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::time::Instant;

use crate::address::{self, Servers};
use crate::connection::{Asking, Connection};
use crate::error::Failure;
use crate::script::{Exchange, Question};
use crate::shared_connection::SharedConnection;

/// How often an exchange is tried, as each may be sent again: the connection may have ended since it was used last, and then
/// an answer may be lost.
const ATTEMPTS: u32 = 3;

/// The least time to connect: looking for a primary takes several round trips.
const LEAST_CONNECT: Duration = Duration::from_secs(2);

pub(crate) struct Transport {
    servers: Servers,
    shared: SharedConnection,
    /// For what awaits replicas: a connection does nothing else while it waits.
    waiting: Box<[SharedConnection]>,
    turn: AtomicUsize,
    timeout: Duration,
}

/// What was answered, one value for each command, and how many replicas have it, if those are fewer than were awaited.
pub(crate) struct Reply {
    pub(crate) values: Vec<Value>,
    pub(crate) too_few: Option<i64>,
    /// Whether it was sent before as well, and may have been carried out then.
    pub(crate) is_repeated: bool,
}

/// An error, and whether the command before it that writes was carried out.
struct Refusal {
    error: RedisError,
    has_written: bool,
}

impl From<RedisError> for Refusal {
    fn from(error: RedisError) -> Self {
        Self { error, has_written: false }
    }
}

/// What is sent, and to whom.
enum Message<'a> {
    Record(&'a Exchange<'a>),
    Everybody(&'a Cmd),
}

/// A connection of a call's own, or one that it shares.
enum Held<'a> {
    Shared {
        connection: Connection,
        shared: &'a SharedConnection,
        generation: u64,
    },
    #[cfg(feature = "deadpool")]
    Pooled(deadpool_redis::Connection),
}

impl Transport {
    pub(crate) fn new(servers: Servers, timeout: Duration, replica_connections: usize) -> Self {
        let waiting = std::iter::repeat_with(SharedConnection::default).take(replica_connections).collect();
        Self { servers, shared: SharedConnection::default(), waiting, turn: AtomicUsize::new(0), timeout }
    }

    /// A way to the same servers by connections of its own, which the runtime drives on which it is used first.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.servers.beside_pool(), self.timeout, self.waiting.len().min(1))
    }

    /// When a verb that begins now has to be over.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Asks the server that has a key and, if the exchange says so, waits for replicas.
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

    /// Whether the connections are made beside an application's pool, so that the hooks of the pool have not seen them.
    pub(crate) fn is_beside_pool(&self) -> bool {
        self.servers.are_beside_pool()
    }

    /// What every primary answers.
    pub(crate) async fn ask_all(&self, command: &Cmd) -> Result<Vec<Value>, Failure> {
        Ok(self.ask(&Message::Everybody(command), self.deadline()).await?.values)
    }

    async fn ask(&self, question: &Message<'_>, deadline: Instant) -> Result<Reply, Failure> {
        let mut was_sent = false;
        let mut attempts = 1;
        let mut asking = None;
        // The same one for every attempt: the others may lead to the same server that has ended them.
        let shared = self.connection_for(question);
        loop {
            let holding = self.hold(shared, attempts == ATTEMPTS);
            let mut held = match tokio::time::timeout_at(deadline, holding).await {
                Ok(Ok(held)) => held,
                Ok(Err(error)) => return Err(Failure::NotConnected { error, was_sent }),
                Err(_) => return Err(Failure::NotConnectedInTime { timeout: self.timeout, was_sent }),
            };
            let asked_at = Instant::now();
            let limit = self.limit(attempts, asked_at, deadline);
            let Ok(answer) = tokio::time::timeout_at(limit, held.ask(question, asking.as_ref())).await else {
                if limit < deadline {
                    // Another server may have the slot of the key by now, as the next connection will know.
                    self.renew(held);
                    was_sent = true;
                    attempts = ATTEMPTS;
                    continue;
                }
                // Perhaps it is slow, perhaps nothing will ever come: whoever comes next shall not find out. If most of the
                // time went by before there was a connection, that one has done nothing wrong.
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
                    // The driver of a Cluster sends again by itself, and tells of the last time only.
                    was_sent |= has_written || !is_refusal(&error) || self.is_cluster();
                    error
                }
            };
            // A slot on the move, or one without a server for a moment: it is somewhere, or will be.
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

    /// Until when to wait for an answer. In a Cluster, half of the time is for a second try: a server that hangs may have
    /// been replaced, and nobody tells.
    fn limit(&self, attempts: u32, asked_at: Instant, deadline: Instant) -> Instant {
        match self.servers {
            Servers::Cluster(..) if attempts < ATTEMPTS => deadline.min(asked_at + self.timeout / 2),
            _ => deadline,
        }
    }

    /// Where the connection for the question is.
    fn connection_for(&self, question: &Message<'_>) -> &SharedConnection {
        match question {
            Message::Record(Exchange { replicas: Some(_), .. }) => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.waiting.len();
                self.waiting.get(turn).unwrap_or(&self.shared)
            }
            _ => &self.shared,
        }
    }

    /// A connection of the pool, or the shared one. If `is_new`, the one that a task is making, if there is such a task.
    async fn hold<'a>(&'a self, shared: &'a SharedConnection, is_new: bool) -> RedisResult<Held<'a>> {
        #[cfg(feature = "deadpool")]
        if let Servers::Pool(pool) = &self.servers {
            let connection = pool.get().await.map_err(pool_error)?;
            return Ok(Held::Pooled(connection));
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

    /// Connecting may take longer than a verb: it is done once for all who wait.
    fn connect_limit(&self) -> Duration {
        (self.timeout * 2).max(LEAST_CONNECT)
    }

    /// Leaves a connection on which no answer came. The servers of a Cluster have one each behind it, and most of them may
    /// be well, so it serves until there is another that knows who has which slots now.
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
            held @ Held::Pooled(_) => held.discard(),
        }
    }
}

async fn connect(servers: Servers, limit: Duration) -> RedisResult<Connection> {
    // A call has a deadline of its own.
    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(None);
    let client = match servers {
        Servers::One(client) => client,
        Servers::Sentinel(sentinels) => address::primary(&sentinels).await?,
        Servers::Cluster(client, _) => return client.get_async_connection().await.map(Connection::Cluster),
        #[cfg(feature = "deadpool")]
        Servers::BesidePool(pool) => return primary(pool.manager().create().await?).await,
        #[cfg(feature = "deadpool")]
        // Each call takes a connection of its own out of a pool.
        Servers::Pool(_) => return Err((ErrorKind::Client, "a pool makes its connections itself").into()),
    };
    primary(client.get_multiplexed_async_connection_with_config(&config).await?).await
}

/// Refuses a replica: it would answer what only reads, out of date.
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
            Self::Pooled(connection) => {
                // The clone is another handle of the same connection.
                Connection::One(MultiplexedConnection::clone(connection)).send(commands, key, asking).await
            }
        }
    }

    async fn ask_all(&mut self, command: Cmd) -> RedisResult<Vec<Value>> {
        match self {
            Self::Shared { connection, .. } => connection.ask_all(command).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled(connection) => Ok(vec![connection.send_packed_command(&command).await?.extract_error()?]),
        }
    }

    fn discard(self) {
        match self {
            Self::Shared { shared, generation, .. } => shared.discard(generation),
            #[cfg(feature = "deadpool")]
            Self::Pooled(connection) => drop(deadpool_redis::Connection::take(connection)),
        }
    }
}

/// How long to wait before a slot is looked for again, if that is what the error is about.
fn moving(error: &RedisError) -> Option<Duration> {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::Ask | ServerErrorKind::Moved) => Some(Duration::ZERO),
        ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Duration::from_millis(5)),
        ErrorKind::Server(ServerErrorKind::ClusterDown) => Some(Duration::from_millis(50)),
        _ => None,
    }
}

/// Where a server says that a key is for now.
fn asking_at(error: &RedisError) -> Option<Asking> {
    let is_asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    let (address, _slot) = error.redirect_node().filter(|_| is_asking)?;
    let (host, port) = address.rsplit_once(':')?;
    Some(Asking { host: host.to_owned(), port: port.parse().ok()? })
}

/// Whether another connection may serve where this one did not: it has ended, or leads to a server that takes no writes
/// any more.
fn is_of_no_use(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Io | ErrorKind::Parse | ErrorKind::ClusterConnectionNotFound => true,
        ErrorKind::Server(kind) => matches!(kind, ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown),
        _ => false,
    }
}

/// Whether the server said that it did nothing: it says so before a script's first write. A general error may have come
/// after it, and so may a missing permission, since each command of a script needs its own.
fn is_refusal(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(kind) => !matches!(kind, ServerErrorKind::ResponseError | ServerErrorKind::NoPerm),
        ErrorKind::Extension => true,
        _ => false,
    }
}

/// The driver's error for one of the application's pool.
#[cfg(feature = "deadpool")]
fn pool_error(error: deadpool_redis::PoolError) -> RedisError {
    match error {
        deadpool_redis::PoolError::Backend(error) => error,
        other => RedisError::from(std::io::Error::other(other)),
    }
}
