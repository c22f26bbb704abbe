//! A pub/sub subscription that reports the settlements of other processes to waiting callers.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use idem_core::{RecordId, SettlementListener};
use redis::aio::{PubSub, PubSubSink};
use redis::{Client, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::address::Servers;
use crate::keys::Keys;

/// How long a subscription may be silent before a `PING` tests its connection.
const SILENCE: Duration = Duration::from_secs(5);

/// How long a server may take to connect or to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The backoff of a subscription that fails: it doubles from the first pause to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// One subscription for the whole store, started by its first listener.
///
/// Its messages are hints: waiters also poll, so a lost message costs only a moment.
pub(crate) struct Subscription {
    /// Separate clients, so that verbs do not wait while the subscription looks for a server.
    servers: Servers,
    keys: Keys,
    channel: Vec<u8>,
    runtime: Handle,
    listeners: Arc<Listeners>,
    task: Mutex<Option<AbortHandle>>,
}

#[derive(Default)]
struct Listeners(Mutex<Vec<Weak<dyn SettlementListener>>>);

impl Subscription {
    pub(crate) fn new(servers: Servers, keys: Keys, runtime: Handle) -> Self {
        let channel = keys.channel().into_bytes();
        Self { servers, keys, channel, runtime, listeners: Arc::default(), task: Mutex::default() }
    }

    pub(crate) fn channel(&self) -> &[u8] {
        &self.channel
    }

    /// Reports further settlements to `listener`, and starts the subscription.
    pub(crate) fn tell(&self, listener: Weak<dyn SettlementListener>) {
        self.listeners.add(listener);
        self.listen(true);
    }

    /// Restarts the subscription if its task has ended, for instance with its runtime. For callers that may be about to wait.
    pub(crate) fn keep(&self) {
        self.listen(false);
    }

    fn listen(&self, is_wanted: bool) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().map_or(is_wanted, AbortHandle::is_finished) && is_possible(&self.servers) {
            let (servers, keys, channel) = (self.servers.clone(), self.keys.clone(), self.channel.clone());
            let listeners = Arc::clone(&self.listeners);
            // The runtime that the store was opened in may have ended since.
            let runtime = Handle::try_current().unwrap_or_else(|_| self.runtime.clone());
            *task = Some(runtime.spawn(listen(servers, keys, channel, listeners)).abort_handle());
        }
    }
}

/// Whether a subscription is possible: a pool lends its connections for a moment only.
fn is_possible(servers: &Servers) -> bool {
    match servers {
        #[cfg(feature = "deadpool")]
        Servers::Pool(_) | Servers::BesidePool(_) => false,
        _ => true,
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner) {
            task.abort();
        }
    }
}

impl Listeners {
    fn add(&self, listener: Weak<dyn SettlementListener>) {
        let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }

    fn tell(&self, id: &RecordId) {
        // A listener may run any code, so the lock is released first.
        let listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for listener in listeners.iter().filter_map(Weak::upgrade) {
            // A listener that panics does not affect the others.
            if std::panic::catch_unwind(AssertUnwindSafe(|| listener.settled(id))).is_err() {
                tracing::error!("a listener of settlements panicked");
            }
        }
    }
}

async fn listen(servers: Servers, keys: Keys, channel: Vec<u8>, listeners: Arc<Listeners>) {
    let mut pause = FIRST_PAUSE;
    let mut was_refused = false;
    loop {
        match subscribe(&servers, &channel).await {
            Ok(subscription) => {
                pause = FIRST_PAUSE;
                follow(subscription, &keys, &listeners).await;
            }
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                if !std::mem::replace(&mut was_refused, true) {
                    let message = "the user may not subscribe to settlements, so waiters only poll";
                    tracing::warn!(error = &error as &dyn std::error::Error, message);
                }
                pause = LAST_PAUSE;
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "could not subscribe to settlements");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Passes messages to the listeners until the subscription ends or its connection stops answering.
async fn follow(subscription: PubSub, keys: &Keys, listeners: &Listeners) {
    let (mut sink, mut messages) = subscription.split();
    loop {
        match tokio::time::timeout(SILENCE, messages.next()).await {
            Ok(Some(message)) => {
                if let Some(id) = keys.id(message.get_payload_bytes()) {
                    listeners.tell(&id);
                }
            }
            Ok(None) => return,
            Err(_) if answers(&mut sink).await => {}
            Err(_) => return,
        }
    }
}

async fn answers(sink: &mut PubSubSink) -> bool {
    matches!(tokio::time::timeout(PATIENCE, sink.ping::<redis::Value>()).await, Ok(Ok(_)))
}

async fn subscribe(servers: &Servers, channel: &[u8]) -> RedisResult<PubSub> {
    let at = async |client: &Client| -> RedisResult<PubSub> {
        let subscribed = async {
            let mut subscription = client.get_async_pubsub().await?;
            subscription.subscribe(channel).await?;
            Ok(subscription)
        };
        tokio::time::timeout(PATIENCE, subscribed).await.unwrap_or_else(|_| Err(nobody("it did not answer")))
    };
    match servers {
        Servers::One(client) => at(client).await,
        Servers::Sentinel(sentinels) => {
            let client = tokio::time::timeout(PATIENCE, crate::address::primary(sentinels)).await;
            at(&client.unwrap_or_else(|_| Err(nobody("no Sentinel answered")))?).await
        }
        // A Cluster forwards each message to all its servers, so any one of them will do.
        Servers::Cluster(_, seeds) => {
            let mut failed = nobody("the Cluster has no servers");
            for seed in seeds.iter() {
                match at(seed).await {
                    Ok(subscription) => return Ok(subscription),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        }
        #[cfg(feature = "deadpool")]
        Servers::Pool(_) | Servers::BesidePool(_) => Err(nobody("a pool has no subscription")),
    }
}

fn nobody(why: &'static str) -> RedisError {
    RedisError::from((ErrorKind::Client, why))
}
