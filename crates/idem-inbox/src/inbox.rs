//! Handles a message once: decides by its record, runs the handler, and says what the broker has to be told.

use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, ExecuteError, Idempotency, Operation};
use idem_core::{
    Fingerprint, OnMismatch, Replay, ReplayKind, Scope, StoreError, StoreErrorKind, StoredBody, StoredResponse, Writes,
};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use uuid::Uuid;

use crate::message::{Message, hashed};
use crate::parking::{ParkedMessage, Parking};
use crate::settings::{InboxSettings, SUSPECT_FROM};

/// How long a message waits that another process handles, or whose record could not be asked.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// How long a message waits whose record cannot be read, perhaps because a newer version wrote it.
const UNREADABLE: Duration = Duration::from_secs(30);

/// How long to wait for the parking's database.
const PARKING_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of an error's text is kept as a reason.
const MAX_REASON_BYTES: usize = 1024;

/// Handles each message of a subscriber once. Clones share everything.
///
/// A message has an ordinary record: its operation is `inbox:<subscriber>`, its key the id of the message, and its fingerprint
/// that of the payload. The contract of the engine says what a crash in the middle of a run means.
#[derive(Clone)]
pub struct Inbox {
    shared: Arc<Shared>,
}

struct Shared {
    subscriber: String,
    engine: Idempotency,
    parking: Arc<dyn Parking>,
    settings: InboxSettings,
    /// One suspect runs at a time, besides other messages: if it stops the process, no other suspect is lost with it.
    suspect: Semaphore,
    /// Messages that are no suspects and have a lost run in the parking, which is taken back when they end.
    counted: Mutex<HashSet<String>>,
}

/// What the broker has to be told about a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a consumer must handle every case")]
pub enum Decision {
    /// The message has taken effect, now or before. Acknowledge it.
    Ack,
    /// The message was set aside for this reason. Acknowledge it.
    Parked(ParkReason),
    /// The message is handled elsewhere, or its next attempt is due later. Deliver it again after this time.
    RedeliverAfter(Duration),
    /// The store is unavailable, or the engine shuts down. Give the message back, and take no other one for this time.
    Pause(Duration),
}

/// Why a message was set aside.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParkReason {
    /// The handler has rejected the message, or has failed in all its attempts.
    #[error("failed: {0}")]
    Failed(String),
    /// A run was interrupted under AtMostOnce.
    #[error("outcome unknown: a run was interrupted, and may have taken effect")]
    OutcomeUnknown,
    /// Another payload has this id.
    #[error("another payload: a message with this id and another payload was handled before")]
    OtherPayload,
    /// Each of its runs has ended its process, or could not be committed.
    #[error("lost: its runs ended with their process, or could not be committed")]
    Lost,
    /// It has no id, so that repeats could not be recognised.
    #[error("no id: a repeat of the message could not be recognised")]
    NoId,
    /// It was delivered before, and so long ago that its record may have been purged.
    #[error("forgotten: it was delivered before, and a record of that time is no longer kept")]
    Forgotten,
}

/// Why a message was not handled. Every error becomes a [`Fault`](Self::Fault) by `?`.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth way to fail")]
pub enum MessageError {
    /// The message can never be handled: it is parked.
    Reject {
        /// What is wrong with it. It is kept with the parked message.
        why: String,
    },
    /// It had no effect, and may run again.
    Retry {
        /// How long to wait; by default the engine's backoff.
        after: Option<Duration>,
        /// What went wrong. It is kept with the message if that is parked.
        why: String,
    },
    /// An unexpected error. Under AtMostOnce the message is parked. Under the other contracts it runs again after the engine's
    /// backoff, up to its [`max_attempts`](idem_core::engine::Settings::max_attempts), and is parked then.
    Fault(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for MessageError {
    fn from(error: E) -> Self {
        Self::Fault(error.into())
    }
}

/// An inbox that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidInbox {
    /// The name is not 1 to 64 ASCII letters, digits, `-`, `_` and `.`.
    #[error("`{0}` is no name of a subscriber: it has 1 to 64 ASCII letters, digits, '-', '_' and '.'")]
    Subscriber(String),
    /// The engine answers a message with another payload like the first one, so that it would be acknowledged without an effect.
    #[error(
        "the engine of the inbox has on_mismatch(ReplayOriginal), by which another payload under an id is lost; remove it"
    )]
    IgnoresPayloads,
    /// The engine runs messages without a record if its store is unavailable. Their repeats would run again.
    #[error("the engine of the inbox has dangerous_fail_open, by which a message can run without a record; remove it")]
    FailsOpen,
    /// A message could be delivered again when the record of its first run is no longer kept.
    #[error(
        "the broker may deliver a message again for {redelivery:?}, and records are kept for {retention:?} only; set the \
         retention of the inbox's engine to more"
    )]
    Retention {
        /// The longest time between two deliveries of a message.
        redelivery: Duration,
        /// The retention of the engine.
        retention: Duration,
    },
}

/// What a run leaves.
enum Left {
    Done,
    Failed(ParkReason),
    AnotherAttempt { after: Option<Duration> },
}

/// What a run means for the count of lost ones.
#[derive(Clone, Copy)]
enum Counts {
    /// It did not run.
    Nothing,
    /// Its handler may have run, and left no trace in the record.
    Lost,
    /// It left an attempt in the record, which counts those, or a result.
    Recorded,
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
        let operation = self.operation(self.scope(), message);
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
    /// Each requested replay runs once, under a record of its own. A consumer calls this for the messages that
    /// [`Parking::list`] names as requested.
    pub async fn replay<F, R>(&self, parked: &ParkedMessage, handler: F)
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        let shared = &*self.shared;
        let scope = Scope::single_tenant(format!("inbox:{}:replay:{}", shared.subscriber, parked.replays));
        let operation = self.operation(scope, &parked.message);
        let decision = match self.has_taken_effect(&parked.message).await {
            Ok(true) => Decision::Ack,
            Ok(false) => self.decide(&parked.message, operation, true, handler).await,
            Err(error) => self.not_asked(&parked.message, &error),
        };
        let failure = match decision {
            Decision::Ack => None,
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

    /// Whether a delivery of this message has completed.
    async fn has_taken_effect(&self, message: &Message) -> Result<bool, StoreError> {
        let operation = self.operation(self.scope(), message);
        let record = self.shared.engine.find(&operation).await?;
        Ok(record.is_some_and(|record| {
            let is_completed = record.replay().is_some_and(|replay| replay.kind == ReplayKind::Completed);
            is_completed && record.fingerprint == *operation.fingerprint()
        }))
    }

    fn scope(&self) -> Scope {
        Scope::single_tenant(format!("inbox:{}", self.shared.subscriber))
    }

    fn operation(&self, scope: Scope, message: &Message) -> Operation {
        let fingerprint = Fingerprint::of_bytes(&self.shared.subscriber, &message.payload);
        Operation::new(scope, message.key(), fingerprint).wait(Duration::ZERO)
    }

    /// Runs the handler if the record allows it. Parks nothing.
    async fn decide<F, R>(&self, message: &Message, operation: Operation, is_suspect: bool, handler: F) -> Decision
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        let Shared { engine, parking, settings, subscriber, .. } = &*self.shared;
        if self.may_be_forgotten(message) {
            match engine.find(&operation).await {
                Ok(Some(_)) => {}
                Ok(None) => return Decision::Parked(ParkReason::Forgotten),
                Err(error) => return self.not_asked(message, &error),
            }
        }
        if !is_suspect {
            let (decision, counts) = self.execute(message, operation.clone(), handler).await;
            return match counts {
                Counts::Lost => self.count_loss(message, operation).await,
                Counts::Recorded => {
                    self.take_losses_back(message).await;
                    decision
                }
                Counts::Nothing => decision,
            };
        }
        // Never closed.
        let alone = self.shared.suspect.acquire().await;
        let key = message.parking_key();
        let begun = match bounded(parking.begin(subscriber, &key)).await {
            Ok(begun) if begun > settings.max_lost_runs => return self.give_up(message, operation).await,
            Ok(begun) => begun,
            Err(error) => return self.pause(message, &error),
        };
        let (decision, counts) = self.execute(message, operation, handler).await;
        drop(alone);
        let lost = match counts {
            Counts::Nothing => begun - 1,
            Counts::Lost => begun,
            Counts::Recorded => 0,
        };
        if let Err(error) = bounded(parking.report(subscriber, &key, lost)).await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                message = message.id,
                "a run that has ended stays counted as lost"
            );
        }
        decision
    }

    async fn execute<F, R>(&self, message: &Message, operation: Operation, handler: F) -> (Decision, Counts)
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

    /// Counts a run that could not be committed, and parks its message after as many as the engine allows attempts.
    async fn count_loss(&self, message: &Message, operation: Operation) -> Decision {
        let Shared { parking, engine, subscriber, .. } = &*self.shared;
        let key = message.parking_key();
        let lost = bounded(parking.begin(subscriber, &key)).await;
        self.counted().insert(key);
        match lost {
            Ok(lost) if lost >= engine.settings().attempt_limit() => self.give_up(message, operation).await,
            Ok(_) => Decision::RedeliverAfter(TRY_AGAIN),
            Err(error) => self.pause(message, &error),
        }
    }

    async fn take_losses_back(&self, message: &Message) {
        let key = message.parking_key();
        if !self.counted().remove(&key) {
            return;
        }
        let Shared { parking, subscriber, .. } = &*self.shared;
        if let Err(error) = bounded(parking.report(subscriber, &key, 0)).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "lost runs stay counted, and are purged");
        }
    }

    fn counted(&self) -> MutexGuard<'_, HashSet<String>> {
        self.shared.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails a message whose runs were lost. Its record decides between this and a run that goes on just now.
    async fn give_up(&self, message: &Message, operation: Operation) -> Decision {
        let lost = || {
            let response = failure(&ParkReason::Lost.to_string());
            conclusion(Left::Failed(ParkReason::Lost), Disposition::Fail { response })
        };
        match self.shared.engine.execute(operation, move |_| async move { lost() }, lost).await {
            Ok(Answer::Ran { .. }) => Decision::Parked(ParkReason::Lost),
            Ok(Answer::Replay(replay)) => replayed(&replay),
            Ok(Answer::InProgress { retry_after } | Answer::Backoff { retry_after }) => {
                Decision::RedeliverAfter(retry_after)
            }
            Ok(Answer::Mismatch) => Decision::Parked(ParkReason::OtherPayload),
            Err(ExecuteError::NotAdmitted(error) | ExecuteError::Busy(error)) => self.not_asked(message, &error),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    message = message.id,
                    "a lost message could not be parked yet"
                );
                Decision::RedeliverAfter(TRY_AGAIN)
            }
        }
    }

    /// Whether an earlier delivery of the message may have had a record that has been purged.
    fn may_be_forgotten(&self, message: &Message) -> bool {
        let retention = self.shared.engine.settings().record_retention();
        message.delivery > 1 && message.age.is_some_and(|age| age >= retention)
    }

    /// The store did not say what to do with the message.
    fn not_asked(&self, message: &Message, error: &StoreError) -> Decision {
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

    fn pause(&self, message: &Message, error: &StoreError) -> Decision {
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

/// What a final record means for its message.
fn replayed(replay: &Replay) -> Decision {
    match replay.kind {
        ReplayKind::Completed => Decision::Ack,
        ReplayKind::OutcomeUnknown => Decision::Parked(ParkReason::OutcomeUnknown),
        ReplayKind::Failed => {
            let why = match &replay.response.body {
                StoredBody::Retained(body) => String::from_utf8_lossy(body).into_owned(),
                StoredBody::NotRetained => String::new(),
            };
            let is_lost = why == ParkReason::Lost.to_string();
            Decision::Parked(if is_lost { ParkReason::Lost } else { ParkReason::Failed(why) })
        }
    }
}

/// What a run means for its record.
fn concluded(contract: Contract, result: Result<(), MessageError>, log: impl FnOnce(&str)) -> Conclusion<Left> {
    match result {
        Ok(()) => {
            let response = StoredResponse::new(204, "");
            conclusion(Left::Done, Disposition::Complete { response, writes: Writes::Keep })
        }
        Err(MessageError::Reject { why }) => {
            let response = failure(&why);
            conclusion(Left::Failed(ParkReason::Failed(why)), Disposition::Fail { response })
        }
        Err(MessageError::Retry { after, why }) => {
            log(&why);
            let response = failure(&why);
            conclusion(Left::AnotherAttempt { after }, Disposition::Retry { response, after })
        }
        Err(MessageError::Fault(error)) => {
            let why = error.to_string();
            log(&why);
            faulted(contract, &why)
        }
    }
}

/// A fault counts as an attempt under every contract but AtMostOnce: a transaction that is rolled back would leave no record, and
/// the message would be delivered without an end.
fn faulted(contract: Contract, why: &str) -> Conclusion<Left> {
    let response = failure(why);
    let again = Left::AnotherAttempt { after: None };
    match contract {
        Contract::AtMostOnce => {
            conclusion(Left::Failed(ParkReason::Failed(why.to_owned())), Disposition::Fault { response })
        }
        Contract::AtLeastOnce => conclusion(again, Disposition::Fault { response }),
        Contract::Transactional => conclusion(again, Disposition::Retry { response, after: None }),
    }
}

fn conclusion(value: Left, disposition: Disposition) -> Conclusion<Left> {
    Conclusion { value, disposition, retention: None }
}

/// The result of a message that has failed. Operators see it, and no client does.
fn failure(why: &str) -> StoredResponse {
    StoredResponse::new(500, shortened(why))
}

/// A text that every database can keep.
fn shortened(text: &str) -> String {
    let end = (0..=MAX_REASON_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].replace('\0', "")
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
