//! The loop: takes messages from a broker, handles them, and tells the broker how that went.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use idem_core::engine::Context;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until, timeout};

use crate::decision::{Decision, InvalidInbox, MessageError};
use crate::inbox::Inbox;
use crate::message::Message;
use crate::parking::ParkedMessage;
use crate::settings::SUSPECT_FROM;

/// An error of a broker's client.
pub type BrokerError = Box<dyn std::error::Error + Send + Sync>;

/// The longest wait for a message's next attempt in this process, if the broker can deliver it later. Each delivery counts, so short
/// waits are spent here.
const WAIT_HERE: Duration = Duration::from_secs(60);

/// How long a message is held while the store is unavailable. Then another process may have it, which may reach the store. Brokers that
/// cannot delay a delivery would deliver it again at once, and drop it after some times.
const HOLD_IN_OUTAGE: Duration = Duration::from_secs(30);

/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// How long to wait for a broker's answer, and after its error.
const BROKER_TIMEOUT: Duration = Duration::from_secs(5);
const AFTER_ERROR: Duration = Duration::from_secs(1);

const REPLAY_EVERY: Duration = Duration::from_secs(5);
const REPLAY_BATCH: NonZeroU32 = NonZeroU32::new(16).unwrap();
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PURGE_BATCH: NonZeroU32 = NonZeroU32::new(500).unwrap();

/// The messages of a queue, as its broker's client delivers them.
#[async_trait]
pub trait Subscription: fmt::Debug + Send + 'static {
    /// Acknowledges a message, or gives it back.
    type Receipt: Receipt;

    /// Waits for the next message. After an error it connects again.
    ///
    /// # Errors
    /// [`BrokerError`].
    ///
    /// # Cancellation safety
    /// No message is lost if the future is dropped.
    async fn receive(&mut self) -> Result<(Message, Self::Receipt), BrokerError>;

    /// Ends the subscription, and gives back what was received from the broker and not by the caller.
    async fn close(self);

    /// Asks for messages in the order of their ordering keys. Called before the first message is received, if at all.
    fn keep_order(&mut self);

    /// The longest time after its publication in which a message may be delivered, if the broker tells.
    fn longest_redelivery(&self) -> Option<Duration>;

    /// How often [`Receipt::hold`] has to be called for each message that is held; `None` if never.
    fn hold_every(&self) -> Option<Duration>;

    /// Whether [`Receipt::give_back`] can delay the next delivery.
    fn can_delay(&self) -> bool;
}

/// Tells a broker about one message. A broker that cannot be told delivers the message again, and the inbox recognises it.
#[async_trait]
pub trait Receipt: Send + Sync + 'static {
    /// Acknowledges the message: it is not delivered again.
    ///
    /// # Errors
    /// [`BrokerError`].
    async fn ack(&self) -> Result<(), BrokerError>;

    /// Gives the message back. It is delivered again, here or elsewhere, after `delay` if the broker can delay.
    ///
    /// # Errors
    /// [`BrokerError`].
    async fn give_back(&self, delay: Duration) -> Result<(), BrokerError>;

    /// Tells that the message is still held.
    ///
    /// # Errors
    /// [`BrokerError`].
    async fn hold(&self) -> Result<(), BrokerError>;
}

/// Handles the messages of a subscription by an inbox.
#[derive(Debug)]
pub struct Consumer<S> {
    inbox: Inbox,
    subscription: S,
    concurrency: NonZeroU32,
    max_held: NonZeroU32,
    is_ordered: bool,
}

type Handler = Arc<dyn Fn(Context, Message) -> BoxFuture<'static, Result<(), MessageError>> + Send + Sync>;

/// What the tasks of a consumer share.
struct Shared {
    inbox: Inbox,
    handler: Handler,
    slots: Semaphore,
    suspect: Semaphore,
    /// Messages wait until then, because the store was unavailable.
    paused_until: watch::Sender<Option<Instant>>,
    is_stopping: watch::Receiver<bool>,
    is_ordered: bool,
    hold_every: Option<Duration>,
    can_delay: bool,
}

impl<S: Subscription> Consumer<S> {
    /// A consumer that handles 16 messages at once, holds 256, and keeps no order.
    ///
    /// # Errors
    /// [`InvalidInbox::Retention`] if the broker says that it delivers messages for longer than the inbox keeps records.
    pub fn new(inbox: Inbox, subscription: S) -> Result<Self, InvalidInbox> {
        match subscription.longest_redelivery() {
            Some(redelivery) => inbox.check_retention(redelivery)?,
            None => tracing::warn!(
                subscriber = inbox.subscriber(),
                "the broker does not say for how long it delivers a message; the inbox recognises repeats for its retention only"
            ),
        }
        let concurrency = NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN);
        let max_held = NonZeroU32::new(256).unwrap_or(NonZeroU32::MIN);
        Ok(Self { inbox, subscription, concurrency, max_held, is_ordered: false })
    }

    /// How many messages are handled at once. Default 16.
    #[must_use]
    pub fn concurrency(mut self, limit: NonZeroU32) -> Self {
        self.concurrency = limit;
        self
    }

    /// How many messages are held at once: those that run, and those that wait for a slot, for their next attempt, or for a
    /// message before them. Default 256, so that messages that fail leave room for others. Beyond it, the broker is not asked for more.
    #[must_use]
    pub fn max_held(mut self, limit: NonZeroU32) -> Self {
        self.max_held = limit;
        self
    }

    /// Handles messages of one ordering key one after the other, in the order of the broker. A message that has to wait makes
    /// those behind it wait; a parked one does not.
    ///
    /// The order holds if one process consumes the queue, or if the broker gives all messages of a key to one. See the
    /// subscription's documentation.
    #[must_use]
    pub fn ordered(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// Handles messages until `shutdown` completes, and then until those that run have ended. Messages that wait are given
    /// back.
    ///
    /// It also handles parked messages whose replay was requested.
    ///
    /// # Cancellation safety
    /// If the future is dropped, runs go on in the engine. Their messages are delivered again, and find their result.
    pub async fn run_until<F, R>(mut self, shutdown: impl Future<Output = ()> + Send, handler: F)
    where
        F: Fn(Context, Message) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        if self.is_ordered {
            self.subscription.keep_order();
        }
        let (stop, is_stopping) = watch::channel(false);
        let shared = Arc::new(Shared {
            inbox: self.inbox,
            handler: Arc::new(move |context, message| handler(context, message).boxed()),
            slots: Semaphore::new(self.concurrency.get() as usize),
            suspect: Semaphore::new(1),
            paused_until: watch::Sender::new(None),
            is_stopping,
            is_ordered: self.is_ordered,
            hold_every: self.subscription.hold_every(),
            can_delay: self.subscription.can_delay(),
        });
        let held = Arc::new(Semaphore::new(self.max_held.get() as usize));
        let mut lanes = Lanes::default();
        let mut tasks = JoinSet::new();
        tasks.spawn(replay(Arc::clone(&shared)));
        tasks.spawn(purge(Arc::clone(&shared)));
        let mut shutdown = pin!(shutdown);
        loop {
            while tasks.try_join_next().is_some() {}
            let next = async {
                shared.until_unpaused().await;
                // Never closed.
                let room = Arc::clone(&held).acquire_owned().await.ok();
                (room, self.subscription.receive().await)
            };
            let (room, received) = tokio::select! {
                biased;
                () = &mut shutdown => break,
                received = next => received,
            };
            match received {
                Ok((message, receipt)) => {
                    let turn = lanes.turn_of(message.ordering_key.as_ref().filter(|_| shared.is_ordered));
                    tasks.spawn(process(Arc::clone(&shared), message, receipt, turn, room));
                }
                Err(error) => {
                    tracing::warn!(error = &*error as &dyn std::error::Error, "no message could be received");
                    tokio::select! {
                        () = &mut shutdown => break,
                        () = sleep(AFTER_ERROR) => {}
                    }
                }
            }
        }
        stop.send_replace(true);
        // It begins to close before the tasks end. Otherwise the broker would deliver here again what they give back.
        let mut closing = pin!(self.subscription.close());
        let mut is_closed = false;
        loop {
            tokio::select! {
                () = &mut closing, if !is_closed => is_closed = true,
                ended = tasks.join_next() => if ended.is_none() { break },
            }
        }
        if !is_closed && timeout(BROKER_TIMEOUT, closing).await.is_err() {
            tracing::debug!("the subscription did not end in time; the broker delivers its messages again");
        }
    }
}

/// A place in the order of a key.
struct Turn {
    /// Waits for the message before this one, if there is one. An error tells that it was given back.
    before: Option<oneshot::Receiver<()>>,
    /// Dropped unsent if this message was given back, so that those behind it do not run either.
    after: oneshot::Sender<()>,
}

/// The last place of each key.
#[derive(Default)]
struct Lanes {
    last: HashMap<String, oneshot::Receiver<()>>,
}

impl Lanes {
    /// The next place behind the last message of this key. Without a key, nothing is awaited.
    fn turn_of(&mut self, key: Option<&String>) -> Turn {
        /// Below this, ended keys are not removed.
        const FEW: usize = 256;
        let (after, ended) = oneshot::channel();
        let Some(key) = key else { return Turn { before: None, after } };
        if self.last.len() >= self.last.capacity().max(FEW) {
            self.last.retain(|_, last| last.try_recv() == Err(TryRecvError::Empty));
        }
        let mut before = self.last.insert(key.clone(), ended);
        // Nothing has to wait for a message that has ended. One whose task has failed cannot be waited for.
        if before.as_mut().is_some_and(|last| last.try_recv() != Err(TryRecvError::Empty)) {
            before = None;
        }
        Turn { before, after }
    }
}

/// How the work on a message ended.
enum Outcome {
    Ended,
    GivenBack { delay: Duration },
}

/// Handles a message until it has ended or is given back, and tells the broker.
async fn process<R: Receipt>(
    shared: Arc<Shared>,
    message: Message,
    receipt: R,
    turn: Turn,
    _room: Option<OwnedSemaphorePermit>,
) {
    let outcome = tokio::select! {
        outcome = work(&shared, &message, turn.before) => outcome,
        () = hold(&shared, &message, &receipt) => return,
    };
    let told = match outcome {
        Outcome::Ended => {
            // The receiver is gone if no message has come behind this one.
            let _ = turn.after.send(());
            timeout(BROKER_TIMEOUT, receipt.ack()).await
        }
        Outcome::GivenBack { delay } => timeout(BROKER_TIMEOUT, receipt.give_back(delay)).await,
    };
    if let Err(error) = told.unwrap_or_else(|late| Err(late.into())) {
        tracing::debug!(
            error = &*error as &dyn std::error::Error,
            message = message.id,
            "the broker was not told about a message, and delivers it again"
        );
    }
}

async fn work(shared: &Shared, message: &Message, before: Option<oneshot::Receiver<()>>) -> Outcome {
    let stopped = Outcome::GivenBack { delay: Duration::ZERO };
    if let Some(before) = before {
        tokio::select! {
            ended = before => if ended.is_err() { return stopped },
            () = shared.stopping() => return stopped,
        }
    }
    let mut outage: Option<Instant> = None;
    let mut pauses = 0;
    loop {
        let slot = tokio::select! {
            biased;
            () = shared.stopping() => return stopped,
            slot = shared.slot_for(message) => slot,
        };
        let handler = Arc::clone(&shared.handler);
        let decision = shared.inbox.handle(message, move |context, message| handler(context, message)).await;
        drop(slot);
        let wait = match decision {
            Decision::Ack | Decision::Parked(_) => return Outcome::Ended,
            Decision::RedeliverAfter(delay) => {
                outage = None;
                if delay > WAIT_HERE && shared.can_delay && !shared.is_ordered {
                    return Outcome::GivenBack { delay };
                }
                delay
            }
            Decision::Pause(pause) => {
                let pause = pause.saturating_mul(1 << pauses).min(MAX_PAUSE);
                pauses = (pauses + 1).min(16);
                let until = Instant::now() + pause;
                shared
                    .paused_until
                    .send_modify(|paused| *paused = Some(paused.map_or(until, |other| other.max(until))));
                let since = *outage.get_or_insert_with(Instant::now);
                if since.elapsed() >= HOLD_IN_OUTAGE && shared.can_delay && !shared.is_ordered {
                    return Outcome::GivenBack { delay: pause };
                }
                pause
            }
        };
        tokio::select! {
            () = shared.stopping() => return stopped,
            () = sleep(wait) => {}
        }
    }
}

/// Holds a message for as long as the future is polled.
async fn hold<R: Receipt>(shared: &Shared, message: &Message, receipt: &R) {
    let Some(every) = shared.hold_every else { return std::future::pending().await };
    loop {
        sleep(every).await;
        let held = timeout(BROKER_TIMEOUT, receipt.hold()).await;
        if let Err(error) = held.unwrap_or_else(|late| Err(late.into())) {
            tracing::debug!(
                error = &*error as &dyn std::error::Error,
                message = message.id,
                "a message could not be held"
            );
        }
    }
}

impl Shared {
    async fn stopping(&self) {
        // The sender lives until all tasks have ended.
        let _ = self.is_stopping.clone().wait_for(|is_stopping| *is_stopping).await;
    }

    async fn until_unpaused(&self) {
        let mut paused = self.paused_until.subscribe();
        loop {
            let until = *paused.borrow_and_update();
            match until {
                Some(until) if until > Instant::now() => sleep_until(until).await,
                _ => return,
            }
        }
    }

    /// Waits for a place among the messages that are handled. Suspects have one of their own, so that they do not keep the others
    /// from running while they wait for it.
    async fn slot_for(&self, message: &Message) -> Option<SemaphorePermit<'_>> {
        self.until_unpaused().await;
        // Never closed.
        let places = if message.delivery >= SUSPECT_FROM { &self.suspect } else { &self.slots };
        places.acquire().await.ok()
    }
}

/// Handles requested replays.
async fn replay(shared: Arc<Shared>) {
    let mut ticks = every(REPLAY_EVERY);
    let mut last = None;
    loop {
        tokio::select! {
            () = shared.stopping() => return,
            _ = ticks.tick() => last = replay_requested(&shared, last).await,
        }
    }
}

/// Removes old entries of the parking.
async fn purge(shared: Arc<Shared>) {
    let mut ticks = every(PURGE_EVERY);
    loop {
        tokio::select! {
            () = shared.stopping() => return,
            _ = ticks.tick() => shared.inbox.purge(PURGE_BATCH).await,
        }
    }
}

fn every(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Handles the requested replays that follow `last`, and returns the last of them; `None` at the end of the list.
async fn replay_requested(shared: &Shared, last: Option<ParkedMessage>) -> Option<ParkedMessage> {
    let inbox = &shared.inbox;
    // `list` ends within LIST_TIMEOUT.
    let requested = match inbox.parking().list(inbox.subscriber(), true, last.as_ref(), REPLAY_BATCH).await {
        Ok(requested) => requested,
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "requested replays could not be looked up");
            return last;
        }
    };
    for parked in &requested {
        if *shared.is_stopping.borrow() {
            return None;
        }
        let handler = Arc::clone(&shared.handler);
        inbox.replay(parked, move |context, message| handler(context, message)).await;
    }
    requested.into_iter().next_back()
}
