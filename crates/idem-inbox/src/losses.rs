//! Runs that were lost: with their process, or because they could not be committed. They leave nothing in the record, so they are counted
//! in the parking.

use std::collections::HashSet;
use std::sync::{MutexGuard, PoisonError};

use idem_core::engine::{Answer, Context, Disposition, ExecuteError, Operation};

use crate::conclusion::{Counts, Left, conclusion, failure, replayed};
use crate::decision::{Decision, MessageError, ParkReason};
use crate::inbox::{Inbox, Shared, TRY_AGAIN, bounded};
use crate::message::Message;

/// How many messages with lost runs a process remembers. They may end in another process. Lost runs that are not taken back are purged.
const MOST_COUNTED: usize = 10_000;

impl Inbox {
    /// Runs a suspect, alone among the suspects of this process, and counts its run as lost until it has ended.
    pub(crate) async fn run_alone<F, R>(&self, message: &Message, operation: Operation, handler: F) -> Decision
    where
        F: FnOnce(Context, Message) -> R + Send + 'static,
        R: Future<Output = Result<(), MessageError>> + Send + 'static,
    {
        let Shared { parking, settings, subscriber, .. } = &*self.shared;
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
            Counts::Recorded => {
                self.counted().remove(&key);
                0
            }
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

    /// Counts a run that could not be committed, and parks its message after as many as the engine allows attempts.
    pub(crate) async fn count_loss(&self, message: &Message, operation: Operation) -> Decision {
        let Shared { parking, engine, subscriber, .. } = &*self.shared;
        let key = message.parking_key();
        let lost = bounded(parking.begin(subscriber, &key)).await;
        if self.counted().len() < MOST_COUNTED {
            self.counted().insert(key.clone());
        }
        match lost {
            Ok(lost) if lost >= engine.settings().attempt_limit() => {
                self.counted().remove(&key);
                self.give_up(message, operation).await
            }
            Ok(_) => Decision::RedeliverAfter(TRY_AGAIN),
            Err(error) => self.pause(message, &error),
        }
    }

    /// Forgets the lost runs of a message that has ended.
    pub(crate) async fn take_losses_back(&self, message: &Message) {
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
}
