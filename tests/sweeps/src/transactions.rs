//! Handlers' transactions: the business row and the record commit together, whatever comes to harm.

use std::time::{Duration, Instant};

use idem_core::{Acquire, AcquireOutcome, Begin, OwnerOutcome, Settlement, State, StoreError, Writes};
use idem_testkit::fixture::{BACKOFF, KEPT, LEASE, completed, repeat_of, request, response, retryable};

use crate::harm::{Told, Trial};
use crate::hold;
use crate::leased::{is_replay, is_replayed};
use crate::world::{Checked, PATIENCE, Place, World};

/// The pause between two polls of a key that will be free soon.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

/// A part of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Part {
    Begin,
    /// The business write of a handler.
    Write,
    /// The settlement with the business writes, and COMMIT.
    Commit,
    /// The settlement without the business writes, and COMMIT.
    CommitAlone,
    /// A retryable failure without the business writes, and COMMIT.
    CommitFailure,
    RollBack,
}

impl Part {
    pub(crate) const ALL: [Self; 6] =
        [Self::Begin, Self::Write, Self::Commit, Self::CommitAlone, Self::CommitFailure, Self::RollBack];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Write => "the handler's write",
            Self::Commit => "settle and COMMIT",
            Self::CommitAlone => "settle, discard, COMMIT",
            Self::CommitFailure => "fail, discard, COMMIT",
            Self::RollBack => "ROLLBACK",
        }
    }

    fn end(self) -> (Settlement, Writes) {
        match self {
            Self::Begin | Self::Write | Self::Commit => (completed(), Writes::Keep),
            Self::CommitAlone => (completed(), Writes::Discard),
            Self::CommitFailure => (retryable(), Writes::Discard),
            Self::RollBack => (Settlement::Released, Writes::Discard),
        }
    }

    /// Harms it once, and checks the outcome.
    pub(crate) async fn suffer(self, world: &World, trial: &Trial) -> Checked {
        let request = request();
        match self {
            Self::Begin => begin(world, trial, &request).await?,
            Self::Write => write(world, trial, &request).await?,
            _ => {
                let mut transaction = world.begin(&request).await?;
                world.write(&mut *transaction, &request.id).await?;
                let (settlement, writes) = self.end();
                let told = trial.harm(world, transaction.finish(&settlement, KEPT, writes)).await;
                self.ended(world, &request, &told).await?;
            }
        }
        // The same client repeats its request with the same token, or another client asks.
        let next = if trial.turn.is_multiple_of(2) { repeat_of(&request) } else { request.clone() };
        if trial.is_silent() {
            // A silent connection keeps its place in the pool for some seconds.
            world.warm(true).await?;
        }
        self.successor(world, &next).await?;
        world.nothing_is_open().await
    }

    /// Checks that the answer was true, and that all or nothing was committed.
    async fn ended(self, world: &World, request: &Acquire, told: &Told<OwnerOutcome, StoreError>) -> Checked {
        let (_, writes) = self.end();
        let (is_settled, effects) = what_is_there(world, request).await?;
        let kept = i64::from(writes == Writes::Keep);
        let done = is_settled && effects == kept;
        hold!(done || (!is_settled && effects == 0), "settled: {is_settled}, and {effects} business writes");
        match told {
            Some(Ok(OwnerOutcome::Applied)) => {
                hold!(done || self == Self::RollBack, "told Applied, and nothing is there");
                hold!(!is_settled || self != Self::RollBack, "what was rolled back is settled");
            }
            Some(Ok(OwnerOutcome::LeaseLost)) => return Err("told that the lease is lost".into()),
            Some(Err(error)) => {
                hold!(error.is_retryable(), "an error of the connection is not to be repeated: {error:?}");
                hold!(!done || error.is_indeterminate(), "it is there, and the error says that it is not: {error:?}");
            }
            None => {}
        }
        Ok(())
    }

    /// Checks that the next request runs the operation, or gets its outcome.
    async fn successor(self, world: &World, request: &Acquire) -> Checked {
        let transactional = world.transactional.as_ref().ok_or("it has no transactions")?;
        let give_up_at = Instant::now() + PATIENCE;
        let expected = loop {
            let (is_settled, effects) = what_is_there(world, request).await?;
            match transactional.begin(request).await? {
                Begin::Acquired { mut transaction, .. } => {
                    hold!(effects == 0 && !is_answered(world, request).await?, "it runs again, and had run");
                    world.write(&mut *transaction, &request.id).await?;
                    let ended = transaction.finish(&completed(), KEPT, Writes::Keep).await?;
                    hold!(ended == OwnerOutcome::Applied, "the owner cannot settle");
                    break 1;
                }
                Begin::Answered(AcquireOutcome::InProgress { .. }) => {
                    hold!(Instant::now() < give_up_at, "the key stays held");
                    // In SQLite and MariaDB a transaction that was dropped costs one lease, as a crash does.
                    if matches!(world.place, Place::Sqlite | Place::MariaDb) {
                        world.advance(LEASE + Duration::from_secs(1))?;
                    }
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                Begin::Answered(AcquireOutcome::Backoff { .. }) => {
                    hold!(self == Self::CommitFailure && is_settled, "a backoff that nobody asked for");
                    world.advance(BACKOFF + Duration::from_secs(1))?;
                }
                Begin::Answered(told) => {
                    hold!(is_replay(&told, &response()), "told {told:?}");
                    break i64::from(self.end().1 == Writes::Keep);
                }
            }
        };
        is_replayed(world, request).await?;
        let effects = world.effects(&request.id).await?;
        hold!(effects == expected, "{effects} business writes of an operation that is settled");
        Ok(())
    }
}

async fn begin(world: &World, trial: &Trial, request: &Acquire) -> Checked {
    let transactional = world.transactional.as_ref().ok_or("it has no transactions")?;
    match trial.harm(world, transactional.begin(request)).await {
        Some(Ok(Begin::Acquired { mut transaction, .. })) => {
            // Its connection may have ended since.
            let written = world.write(&mut *transaction, &request.id).await;
            let told = match written {
                Ok(()) => Some(transaction.finish(&completed(), KEPT, Writes::Keep).await),
                Err(_) => None,
            };
            Part::Commit.ended(world, request, &told).await
        }
        // The repeat met its own first try: the server had not yet noticed that the first connection had ended.
        Some(Ok(Begin::Answered(AcquireOutcome::InProgress { .. }))) if trial.is_met() => {
            Part::Commit.ended(world, request, &None).await
        }
        Some(Ok(Begin::Answered(told))) => Err(format!("a key that is free was not to be had: {told:?}").into()),
        Some(Err(error)) => {
            hold!(error.is_retryable(), "an error of the connection is not to be repeated: {error:?}");
            Part::Commit.ended(world, request, &None).await
        }
        None => Part::Commit.ended(world, request, &None).await,
    }
}

async fn write(world: &World, trial: &Trial, request: &Acquire) -> Checked {
    let mut transaction = world.begin(request).await?;
    let told = trial.harm(world, world.write(&mut *transaction, &request.id)).await;
    let told = match told {
        Some(Ok(())) => Some(transaction.finish(&completed(), KEPT, Writes::Keep).await),
        Some(Err(_)) | None => {
            drop(transaction);
            None
        }
    };
    Part::Commit.ended(world, request, &told).await
}

/// Returns whether the record is settled, and the number of business writes, both at one moment.
async fn what_is_there(world: &World, request: &Acquire) -> Checked<(bool, i64)> {
    world.nothing_is_open().await?;
    loop {
        let record = world.truth.peek(&request.id).await?;
        let effects = world.effects(&request.id).await?;
        // A transaction that was dropped during COMMIT may still commit.
        if world.truth.peek(&request.id).await? == record {
            let is_settled = record.is_some_and(|record| !matches!(record.state, State::InProgress { .. }));
            return Ok((is_settled, effects));
        }
    }
}

/// Whether the record has a final answer.
async fn is_answered(world: &World, request: &Acquire) -> Checked<bool> {
    Ok(world.truth.peek(&request.id).await?.is_some_and(|record| record.replay().is_some()))
}
