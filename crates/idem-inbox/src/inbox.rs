//! Handles a message once: decides by its record, runs the handler, and says what the broker has to be told.

use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::engine::{Answer, Context, Contract, ExecuteError, Idempotency, Operation};
use idem_core::{Fingerprint, IdempotencyKey, OnMismatch, Record, ReplayKind, Scope, StoreError, StoreErrorKind};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use uuid::Uuid;

use crate::conclusion::{Counts, Left, concluded, faulted, replayed, shortened};
use crate::decision::{Decision, InvalidInbox, MessageError, ParkReason};
use crate::message::{Message, hashed};
use crate::parking::{ParkedMessage, Parking};
use crate::settings::{InboxSettings, SUSPECT_FROM};

/// How long a message waits that another process handles, or whose record could not be asked.
pub(crate) const TRY_AGAIN: Duration = Duration::from_secs(1);

/// How long a message waits whose record cannot be read, perhaps because a newer version wrote it.
const UNREADABLE: Duration = Duration::from_secs(30);

/// How long to wait for the parking's database.
const PARKING_TIMEOUT: Duration = Duration::from_secs(5);

/// Handles each message of a subscriber once. Clones share everything.
///
/// A message has an ordinary record: its operation is `inbox:<subscriber>`, its key the id of the message, and its fingerprint
/// that of the payload. The contract of the engine says what a crash in the middle of a run means.
#[derive(Clone)]
pub struct Inbox {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) subscriber: String,
    pub(crate) engine: Idempotency,
    pub(crate) parking: Arc<dyn Parking>,
    pub(crate) settings: InboxSettings,
    /// One suspect runs at a time, besides other messages: if it stops the process, no other suspect is lost with it.
    pub(crate) suspect: Semaphore,
    /// Messages that are no suspects and have a lost run in the parking, which is taken back when they end.
    pub(crate) counted: Mutex<HashSet<String>>,
}

impl Inbox {
    /// An inbox of `subscriber`. The contract of `engine` is that of its messages, and its retention is how long repeats are
    /// recognised.
    ///
    /// # Errors
    /// [`InvalidInbox`].
    pub fn new(
        subscriber: &str,
        engine: Idempotency,
        parking: Arc<dyn Parking>,
        settings: InboxSettings,
    ) -> Result<Self, InvalidInbox> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if subscriber.is_empty() || subscriber.len() > 64 || !subscriber.bytes().all(is_name) {
            return Err(InvalidInbox::Subscriber(subscriber.to_owned()));
        }
        if engine.settings().fails_open() {
            return Err(InvalidInbox::FailsOpen);
        }
        let probe = Operation::new(Scope::single_tenant("inbox"), hashed(""), Fingerprint::of_bytes("", b""));
        if engine.acquire_for(&probe).on_mismatch != OnMismatch::Refuse {
            return Err(InvalidInbox::IgnoresPayloads);
        }
        let (subscriber, suspect, counted) = (subscriber.to_owned(), Semaphore::new(1), Mutex::default());
        Ok(Self { shared: Arc::new(Shared { subscriber, engine, parking, settings, suspect, counted }) })
    }

    /// Checks that records are kept for as long as the broker may deliver a message again. Consumers call it at their start, if
    /// their broker says how long that is.
    ///
    /// # Errors
    /// [`InvalidInbox::Retention`].
    pub fn check_retention(&self, redelivery: Duration) -> Result<(), InvalidInbox> {
        let retention = self.shared.engine.settings().record_retention();
        if redelivery > retention { Err(InvalidInbox::Retention { redelivery, retention }) } else { Ok(()) }
    }

    /// The name of the subscriber.
    #[must_use]
    pub fn subscriber(&self) -> &str {
        &self.shared.subscriber
    }

    /// Where its messages are parked.
    #[must_use]
    pub fn parking(&self) -> &Arc<dyn Parking> {
        &self.shared.parking
    }

    /// Handles a message, unless its record says that it was handled before.
    ///
    /// `handler` gets the context of the run, with its transaction, steps and downstream keys, and the message.
    ///
    /// # Cancellation safety
    /// A run goes on if the future is dropped. The next delivery finds its result.
    pub async fn handle<F, R>(&self, message: &Message, handler: F) -> Decision
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        if message.id.is_empty() {
            // A new id for each delivery: two messages that are equal by chance are both kept.
            let message = Message { id: format!("without-id:{}", Uuid::new_v4()), ..message.clone() };
            return self.park(&message, ParkReason::NoId).await;
        }
        let operation = self.operation(self.scope(), message.key(), message);
        match self.decide(message, operation, message.delivery >= SUSPECT_FROM, handler).await {
            Decision::Parked(reason) => self.park(message, reason).await,
            decision => decision,
        }
    }

    async fn park(&self, message: &Message, reason: ParkReason) -> Decision {
        let Shared { subscriber, parking, .. } = &*self.shared;
        let text = shortened(&reason.to_string());
        tracing::error!(subscriber, message = message.id, reason = text, "a message is parked");
        match bounded(parking.park(subscriber, message, &text)).await {
            Ok(()) => Decision::Parked(reason),
            Err(error) => self.pause(message, &error),
        }
    }

    /// Handles a parked message again whose replay was requested, and reports how that ended.
    ///
    /// Each requested replay runs once. It has another record than the message, with two exceptions. The first replay of a forgotten
    /// message makes the message's record. A message that runs now, or whose record says that it may run again, is replayed under that
    /// record.
    ///
    /// Its [downstream keys](Context::downstream_key) are those of the message, so that another system recognises calls of an earlier run. Its [steps](Context::steps) have new keys, because those of a run that has failed were undone. If
    /// another payload had the id first, the downstream keys differ from those of that message. A consumer calls this for the messages that [`Parking::list`] names as requested.
    pub async fn replay<F, R>(&self, parked: &ParkedMessage, handler: F)
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        let shared = &*self.shared;
        let (decision, is_other) = match self.operation_of_replay(parked).await {
            Ok(None) => (Decision::Ack, false),
            Ok(Some((operation, is_other))) => (self.decide(&parked.message, operation, true, handler).await, is_other),
            Err(error) => (self.not_asked(&parked.message, &error), false),
        };
        let failure = match decision {
            Decision::Ack => None,
            // Another message has just made the record of this id. The next look finds that, and takes another record.
            Decision::Parked(ParkReason::OtherPayload) => return,
            // The next replay has to know that too.
            Decision::Parked(reason) if is_other => {
                Some(shortened(&format!("{}; its replay {reason}", ParkReason::OtherPayload)))
            }
            Decision::Parked(reason) => Some(shortened(&reason.to_string())),
            Decision::RedeliverAfter(_) | Decision::Pause(_) => return,
        };
        let message = &parked.message.id;
        if let Err(error) = bounded(shared.parking.replayed(&shared.subscriber, parked, failure.as_deref())).await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                message,
                "a replay was not reported; its record is asked again"
            );
        }
    }

    /// Removes up to `most` entries of the parking that the records of their time do not outlive. Consumers call it now and then.
    pub async fn purge(&self, most: NonZeroU32) {
        let keep = self.shared.engine.settings().record_retention();
        let Shared { parking, subscriber, .. } = &*self.shared;
        if let Err(error) = bounded(parking.purge(subscriber, keep, most)).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "old entries of the parking could not be removed");
        }
    }

    /// The operation of a requested replay, and whether its id is that of another message; `None` if a delivery of this message has
    /// completed.
    async fn operation_of_replay(&self, parked: &ParkedMessage) -> Result<Option<(Operation, bool)>, StoreError> {
        let ParkedMessage { message, replays, reason, .. } = parked;
        let own = self.operation(self.scope(), message.key(), message);
        let record = self.shared.engine.find(&own).await?;
        let is_of_other = record.as_ref().is_some_and(|record| record.fingerprint != *own.fingerprint());
        let is_completed = |record: &Record| record.replay().is_some_and(|replay| replay.kind == ReplayKind::Completed);
        if !is_of_other && record.as_ref().is_some_and(is_completed) {
            return Ok(None);
        }
        // A forgotten message has no record. Its first replay makes it, so that a further delivery finds it.
        let is_forgotten = *replays == 1 && *reason == ParkReason::Forgotten.to_string();
        if is_forgotten && !is_of_other {
            return Ok(Some((own, false)));
        }
        // Later, the record of the other message may have expired.
        let is_other = is_forgotten || reason.starts_with(&ParkReason::OtherPayload.to_string());
        // Two messages with one id have two keys.
        let replay = |scope| self.operation(Scope::single_tenant(scope), hashed(&message.parking_key()), message);
        let subscriber = &self.shared.subscriber;
        let original = if is_other { replay(format!("inbox:{subscriber}:replay")) } else { own.clone() };
        let original = self.shared.engine.acquire_for(&original).id;
        let operation = replay(format!("inbox:{subscriber}:replay:{replays}")).downstream_keys_of(original);
        // A delivery runs, or the next one would: its outcome was unknown, and an operator has resolved it. If this replay ran beside
        // its record, both would take effect.
        let is_open = !is_of_other && record.is_some_and(|record| record.replay().is_none());
        if is_open && self.shared.engine.find(&operation).await?.is_none() {
            return Ok(Some((own, false)));
        }
        Ok(Some((operation, is_other)))
    }

    fn scope(&self) -> Scope {
        Scope::single_tenant(format!("inbox:{}", self.shared.subscriber))
    }

    fn operation(&self, scope: Scope, key: IdempotencyKey, message: &Message) -> Operation {
        let fingerprint = Fingerprint::of_bytes(&self.shared.subscriber, &message.payload);
        Operation::new(scope, key, fingerprint).wait(Duration::ZERO).trace(message.trace())
    }

    /// Runs the handler if the record allows it. Parks nothing.
    async fn decide<F, R>(&self, message: &Message, operation: Operation, is_suspect: bool, handler: F) -> Decision
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        if self.may_be_forgotten(message) {
            match self.shared.engine.find(&operation).await {
                Ok(Some(_)) => {}
                Ok(None) => return Decision::Parked(ParkReason::Forgotten),
                Err(error) => return self.not_asked(message, &error),
            }
        }
        if is_suspect {
            return self.run_alone(message, operation, handler).await;
        }
        let (decision, counts) = self.execute(message, operation.clone(), handler).await;
        match counts {
            Counts::Lost => self.count_loss(message, operation).await,
            Counts::Recorded => {
                self.take_losses_back(message).await;
                decision
            }
            Counts::Nothing => decision,
        }
    }

    pub(crate) async fn execute<F, R>(&self, message: &Message, operation: Operation, handler: F) -> (Decision, Counts)
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        let engine = &self.shared.engine;
        let contract = engine.contract();
        let of_run = message.clone();
        let run = move |context: Context| async move {
            let id = of_run.id.clone();
            concluded(contract, handler(context, of_run).await, |why| {
                tracing::warn!(message = id, why, "a run of a message failed");
            })
        };
        let panicked = move || faulted(contract, "the handler panicked");
        match engine.execute(operation.clone(), run, panicked).await {
            Ok(Answer::Replay(replay)) => (replayed(&replay), Counts::Recorded),
            Ok(Answer::Ran { value: Left::AnotherAttempt { after }, .. }) => {
                (Decision::RedeliverAfter(after.unwrap_or(TRY_AGAIN)), Counts::Recorded)
            }
            Ok(Answer::Ran { value, .. }) if contract == Contract::Transactional => {
                let decision = if let Left::Failed(reason) = value { Decision::Parked(reason) } else { Decision::Ack };
                (decision, Counts::Recorded)
            }
            Ok(Answer::Ran { .. }) => (self.confirm(message, &operation).await, Counts::Recorded),
            Ok(Answer::InProgress { retry_after } | Answer::Backoff { retry_after }) => {
                (Decision::RedeliverAfter(retry_after), Counts::Nothing)
            }
            Ok(Answer::Mismatch) => (Decision::Parked(ParkReason::OtherPayload), Counts::Nothing),
            Err(error) => self.not_executed(message, &error),
        }
    }

    /// A run has concluded. Its settlement may still go on behind the answer, or may be another one: of a run whose steps have to be
    /// undone first.
    async fn confirm(&self, message: &Message, operation: &Operation) -> Decision {
        match self.shared.engine.find(operation).await {
            Ok(Some(record)) => record.replay().as_ref().map_or(Decision::RedeliverAfter(TRY_AGAIN), replayed),
            Ok(None) => Decision::RedeliverAfter(TRY_AGAIN),
            Err(error) => self.not_asked(message, &error),
        }
    }

    fn not_executed(&self, message: &Message, error: &ExecuteError) -> (Decision, Counts) {
        let counts = match error {
            ExecuteError::NotAdmitted(error) | ExecuteError::Busy(error) => {
                return (self.not_asked(message, error), Counts::Nothing);
            }
            ExecuteError::ShuttingDown => return (Decision::Pause(self.shared.settings.pause), Counts::Nothing),
            // The handler has run, and nothing of it is in the record.
            ExecuteError::TransactionFailed(_) | ExecuteError::TransactionHeld | ExecuteError::Interrupted => {
                Counts::Lost
            }
            // If it was committed after all, the next delivery finds the result.
            ExecuteError::CommitUnclear(_) if self.shared.engine.contract() == Contract::Transactional => Counts::Lost,
            _ => Counts::Nothing,
        };
        tracing::warn!(
            error = error as &dyn std::error::Error,
            message = message.id,
            "a message could not be handled, and will be delivered again"
        );
        (Decision::RedeliverAfter(TRY_AGAIN), counts)
    }

    /// Whether an earlier delivery of the message may have had a record that has been purged.
    fn may_be_forgotten(&self, message: &Message) -> bool {
        let retention = self.shared.engine.settings().record_retention();
        message.delivery > 1 && message.age.is_some_and(|age| age >= retention)
    }

    /// The store did not say what to do with the message.
    pub(crate) fn not_asked(&self, message: &Message, error: &StoreError) -> Decision {
        match error.kind() {
            StoreErrorKind::Corrupt => {
                tracing::error!(
                    error = error as &dyn std::error::Error,
                    message = message.id,
                    "the record of a message cannot be read"
                );
                Decision::RedeliverAfter(UNREADABLE)
            }
            StoreErrorKind::Busy => Decision::RedeliverAfter(TRY_AGAIN),
            _ => self.pause(message, error),
        }
    }

    pub(crate) fn pause(&self, message: &Message, error: &StoreError) -> Decision {
        tracing::warn!(error = error as &dyn std::error::Error, message = message.id, "the inbox pauses");
        Decision::Pause(self.shared.settings.pause)
    }
}

/// Waits for the parking, but not for ever.
pub(crate) async fn bounded<T>(verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(PARKING_TIMEOUT, verb).await.unwrap_or_else(|_| {
        let message = format!("the parking did not answer within {PARKING_TIMEOUT:?}");
        Err(StoreError::new(StoreErrorKind::Timeout, message))
    })
}

impl fmt::Debug for Inbox {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { subscriber, engine, parking, settings, .. } = &*self.shared;
        formatter
            .debug_struct("Inbox")
            .field("subscriber", subscriber)
            .field("engine", engine)
            .field("parking", parking)
            .field("settings", settings)
            .finish_non_exhaustive()
    }
}
