//! The verbs of the port: what must hold after one of them came to harm.

use std::time::{Duration, Instant};

use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, Record, Replay, Settlement, State, StoreError,
    StoredResponse,
};
use idem_testkit::fixture::{
    BACKOFF, KEPT, LEASE, checkpoint, completed, failed, repeat_of, request, response, retryable,
};

use crate::harm::{Told, Trial};
use crate::hold;
use crate::world::{Checked, PATIENCE, World};

/// The pause between two polls of a fast store that learns something late.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A verb with its initial state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Verb {
    Acquire,
    /// An acquire that takes over an expired lease.
    Takeover,
    /// An acquire of the next attempt after a failure.
    Retry,
    /// An acquire of a running operation.
    Busy,
    /// An acquire of a settled operation.
    Replay,
    Renew,
    Checkpoint,
    Settle,
    /// A settlement after which the operation may run again.
    Fail,
    Release,
    Peek,
}

impl Verb {
    pub(crate) const ALL: [Self; 11] = [
        Self::Acquire,
        Self::Takeover,
        Self::Retry,
        Self::Busy,
        Self::Replay,
        Self::Renew,
        Self::Checkpoint,
        Self::Settle,
        Self::Fail,
        Self::Release,
        Self::Peek,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Takeover => "acquire: takeover",
            Self::Retry => "acquire: retry",
            Self::Busy => "acquire: in progress",
            Self::Replay => "acquire: replay",
            Self::Renew => "renew",
            Self::Checkpoint => "checkpoint",
            Self::Settle => "settle: completed",
            Self::Fail => "settle: retryable",
            Self::Release => "settle: released",
            Self::Peek => "peek",
        }
    }

    /// Harms it once, and checks the outcome.
    pub(crate) async fn suffer(self, world: &World, trial: &Trial) -> Checked {
        match self {
            Self::Acquire => acquire(world, trial, &request(), 1).await,
            Self::Takeover => takeover(world, trial).await,
            Self::Retry => retry(world, trial).await,
            Self::Busy => busy(world, trial).await,
            Self::Replay => replay(world, trial).await,
            Self::Renew | Self::Checkpoint => keep(self, world, trial).await,
            Self::Settle => settle(world, trial).await,
            Self::Fail => fail(world, trial).await,
            Self::Release => release(world, trial).await,
            Self::Peek => peek(world, trial).await,
        }
    }
}

/// Acquires a fresh key, or one whose next attempt is due.
async fn acquire(world: &World, trial: &Trial, request: &Acquire, attempt: u32) -> Checked {
    let before = world.truth.peek(&request.id).await?;
    let told = trial.harm(world, world.store.acquire(request)).await;
    world.nothing_is_open().await?;
    let after = world.truth.peek(&request.id).await?;
    let held = after.as_ref().filter(|record| record.owner == request.owner);
    match held {
        Some(record) => {
            let runs = matches!(record.state, State::InProgress { .. });
            hold!(runs && record.attempt == attempt, "half an acquire: {record:?}");
        }
        None => hold!(after == before, "{before:?} became {after:?}, which is nobody's"),
    }
    match &told {
        Some(Ok(AcquireOutcome::Acquired(lease))) => {
            hold!(held.is_some(), "told Acquired, and the record is not there");
            hold!(lease.owner == request.owner && lease.attempt == attempt, "another's lease: {lease:?}");
        }
        Some(Ok(other)) => return Err(format!("a key that is free was not to be had: {other:?}").into()),
        Some(Err(error)) => honest(error, held.is_some())?,
        None => {}
    }
    let asks_first = trial.turn.is_multiple_of(2);
    if held.is_some() || asks_first {
        let rival = repeat_of(request);
        match world.rival.acquire(&rival).await? {
            AcquireOutcome::InProgress { .. } => {}
            AcquireOutcome::Acquired(lease) if held.is_none() => {
                // The first request may have arrived late. The client that was first runs it.
                let mine = world.store.acquire(request).await?;
                hold!(matches!(mine, AcquireOutcome::InProgress { .. }), "a second owner: {mine:?}");
                return ends(world, world.rival.as_ref(), &rival, &lease).await;
            }
            other => return Err(format!("another client was told {other:?}").into()),
        }
    }
    // A repeat with the same token changes nothing.
    let lease = world.lease(request).await?;
    hold!(lease.attempt == attempt, "repeated, it is attempt {}", lease.attempt);
    if let Some(Ok(AcquireOutcome::Acquired(first))) = &told {
        hold!(*first == lease, "{first:?} became {lease:?}");
    }
    let rival = world.rival.acquire(&repeat_of(request)).await?;
    hold!(matches!(rival, AcquireOutcome::InProgress { .. }), "a second owner: {rival:?}");
    ends(world, world.store.as_ref(), request, &lease).await
}

async fn takeover(world: &World, trial: &Trial) -> Checked {
    let first = request();
    let stale = world.lease(&first).await?;
    world.advance(LEASE + Duration::from_secs(1))?;
    acquire(world, trial, &repeat_of(&first), 2).await?;
    is_stale(world, &stale).await
}

async fn retry(world: &World, trial: &Trial) -> Checked {
    let first = request();
    let stale = world.lease(&first).await?;
    world.store.settle(&stale, &retryable(), KEPT).await?;
    world.advance(BACKOFF + Duration::from_secs(1))?;
    acquire(world, trial, &repeat_of(&first), 2).await?;
    is_stale(world, &stale).await
}

async fn busy(world: &World, trial: &Trial) -> Checked {
    let first = request();
    let lease = world.lease(&first).await?;
    let before = world.truth.peek(&first.id).await?;
    let repeat = repeat_of(&first);
    match trial.harm(world, world.store.acquire(&repeat)).await {
        Some(Err(error)) => honest(&error, false)?,
        Some(Ok(told)) => hold!(matches!(told, AcquireOutcome::InProgress { .. }), "a second owner: {told:?}"),
        None => {}
    }
    world.nothing_is_open().await?;
    hold!(world.truth.peek(&first.id).await? == before, "a question changed the record");
    let again = world.store.acquire(&repeat).await?;
    hold!(matches!(again, AcquireOutcome::InProgress { .. }), "a second owner: {again:?}");
    ends(world, world.store.as_ref(), &first, &lease).await
}

async fn replay(world: &World, trial: &Trial) -> Checked {
    let first = request();
    let lease = world.lease(&first).await?;
    world.store.settle(&lease, &completed(), KEPT).await?;
    let before = world.truth.peek(&first.id).await?;
    match trial.harm(world, world.store.acquire(&repeat_of(&first))).await {
        Some(Err(error)) => honest(&error, false)?,
        Some(Ok(told)) => hold!(is_replay(&told, &response()), "told {told:?}"),
        None => {}
    }
    world.nothing_is_open().await?;
    hold!(world.truth.peek(&first.id).await? == before, "a question changed the record");
    is_replayed(world, &first).await
}

/// Harms a verb of an owner while it runs.
async fn keep(verb: Verb, world: &World, trial: &Trial) -> Checked {
    let request = request();
    let lease = world.lease(&request).await?;
    world.advance(Duration::from_secs(1))?;
    let before = world.truth.peek(&request.id).await?;
    let reached = checkpoint("charged");
    let act = async || match verb {
        Verb::Renew => world.store.renew(&lease, request.term).await,
        _ => world.store.checkpoint(&lease, &reached).await,
    };
    let told = trial.harm(world, act()).await;
    world.nothing_is_open().await?;
    let after = world.truth.peek(&request.id).await?;
    let done = after != before;
    applied(&told, done)?;
    let after = after.ok_or("the record is gone")?;
    is_held(&after, &request)?;
    let expected = (done && verb == Verb::Checkpoint).then_some(reached.clone());
    hold!(after.checkpoint == expected, "half a checkpoint: {:?}", after.checkpoint);
    let rival = world.rival.acquire(&repeat_of(&request)).await?;
    hold!(matches!(rival, AcquireOutcome::InProgress { .. }), "a second owner: {rival:?}");
    hold!(act().await? == OwnerOutcome::Applied, "repeated, it is refused");
    let again = world.truth.peek(&request.id).await?.ok_or("the record is gone")?;
    hold!(verb == Verb::Renew || again.checkpoint == Some(reached.clone()), "the checkpoint is not there");
    ends(world, world.store.as_ref(), &request, &lease).await
}

async fn settle(world: &World, trial: &Trial) -> Checked {
    let request = request();
    let lease = world.lease(&request).await?;
    let (before, end) = (world.truth.peek(&request.id).await?, completed());
    let told = trial.harm(world, world.store.settle(&lease, &end, KEPT)).await;
    world.nothing_is_open().await?;
    let after = world.truth.peek(&request.id).await?;
    let done = after.as_ref().is_some_and(|record| is_settled_with(record, &response()));
    hold!(done || after == before, "half a settlement: {after:?}");
    applied(&told, done)?;
    let rival = world.rival.acquire(&repeat_of(&request)).await?;
    let is_late = matches!(rival, AcquireOutcome::InProgress { .. }) && (!done || world.lags());
    hold!(is_late || is_replay(&rival, &response()), "another client was told {rival:?}");
    ends(world, world.store.as_ref(), &request, &lease).await
}

async fn fail(world: &World, trial: &Trial) -> Checked {
    let request = request();
    let lease = world.lease(&request).await?;
    let (before, end) = (world.truth.peek(&request.id).await?, retryable());
    let told = trial.harm(world, world.store.settle(&lease, &end, KEPT)).await;
    world.nothing_is_open().await?;
    let after = world.truth.peek(&request.id).await?;
    let done = after.as_ref().is_some_and(|record| matches!(record.state, State::Failed { .. }));
    hold!(done || after == before, "half a settlement: {after:?}");
    applied(&told, done)?;
    hold!(world.store.settle(&lease, &end, KEPT).await? == OwnerOutcome::Applied, "repeated, it is refused");
    let next = repeat_of(&request);
    let early = world.truth.acquire(&next).await?;
    hold!(matches!(early, AcquireOutcome::Backoff { .. }), "told {early:?}");
    world.advance(BACKOFF + Duration::from_secs(1))?;
    let lease = next_owner(world, &next).await?;
    hold!(lease.attempt == 2, "it is attempt {}", lease.attempt);
    ends(world, world.rival.as_ref(), &next, &lease).await
}

async fn release(world: &World, trial: &Trial) -> Checked {
    let request = request();
    let lease = world.lease(&request).await?;
    let before = world.truth.peek(&request.id).await?;
    let told = trial.harm(world, world.store.settle(&lease, &Settlement::Released, KEPT)).await;
    world.nothing_is_open().await?;
    let after = world.truth.peek(&request.id).await?;
    hold!(after.is_none() || after == before, "half a release: {after:?}");
    applied(&told, after.is_none())?;
    let again = world.store.settle(&lease, &Settlement::Released, KEPT).await?;
    hold!(again == OwnerOutcome::Applied, "repeated, it is refused");
    let next = repeat_of(&request);
    let successor = next_owner(world, &next).await?;
    hold!(successor.attempt == 1, "it is attempt {}", successor.attempt);
    let late = world.store.settle(&lease, &Settlement::Released, KEPT).await?;
    hold!(late == OwnerOutcome::LeaseLost, "a stale owner gave away what is another's");
    ends(world, world.rival.as_ref(), &next, &successor).await
}

async fn peek(world: &World, trial: &Trial) -> Checked {
    let request = request();
    let lease = world.lease(&request).await?;
    world.store.settle(&lease, &completed(), KEPT).await?;
    let record = world.truth.peek(&request.id).await?;
    match trial.harm(world, world.store.peek(&request.id)).await {
        Some(Err(error)) => honest(&error, false)?,
        Some(Ok(seen)) => hold!(seen == record, "{record:?} was read as {seen:?}"),
        None => {}
    }
    world.nothing_is_open().await?;
    hold!(world.store.peek(&request.id).await? == record, "a look changed the record");
    is_replayed(world, &request).await
}

/// Checks that an error is retryable, and that it does not deny what was done.
fn honest(error: &StoreError, done: bool) -> Checked {
    hold!(error.is_retryable(), "an error of the connection is not to be repeated: {error:?}");
    hold!(!done || error.is_indeterminate(), "it was done, and the error says that it was not: {error:?}");
    Ok(())
}

/// Checks that the owner was answered truthfully.
fn applied(told: &Told<OwnerOutcome, StoreError>, done: bool) -> Checked {
    match told {
        Some(Ok(OwnerOutcome::Applied)) => hold!(done, "told Applied, and nothing was done"),
        Some(Ok(OwnerOutcome::LeaseLost)) => return Err("the owner was told that its lease is lost".into()),
        Some(Err(error)) => honest(error, done)?,
        None => {}
    }
    Ok(())
}

fn is_held(record: &Record, request: &Acquire) -> Checked {
    let runs = matches!(record.state, State::InProgress { .. });
    hold!(runs && record.owner == request.owner, "it is not the owner's any more: {record:?}");
    Ok(())
}

fn is_settled_with(record: &Record, expected: &StoredResponse) -> bool {
    matches!(&record.state, State::Completed { response } if response == expected)
}

pub(crate) fn is_replay(outcome: &AcquireOutcome, expected: &StoredResponse) -> bool {
    matches!(outcome, AcquireOutcome::Replay(Replay { response, .. }) if response == expected)
}

/// Settles as the owner, and checks that all clients then get the answer.
async fn ends(world: &World, owners: &dyn IdempotencyStore, request: &Acquire, lease: &Lease) -> Checked {
    for _ in 0..2 {
        hold!(owners.settle(lease, &completed(), KEPT).await? == OwnerOutcome::Applied, "the owner cannot settle");
    }
    let otherwise = owners.settle(lease, &failed(), KEPT).await?;
    hold!(otherwise == OwnerOutcome::LeaseLost, "a settled record was settled otherwise");
    is_replayed(world, request).await
}

/// Acquires a free key as another client.
async fn next_owner(world: &World, request: &Acquire) -> Checked<Lease> {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        match world.rival.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => return Ok(lease),
            AcquireOutcome::InProgress { .. } if world.lags() && Instant::now() < give_up_at => {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            other => return Err(format!("a key that is free was not to be had: {other:?}").into()),
        }
    }
}

/// Checks that a stale owner changes nothing.
async fn is_stale(world: &World, lease: &Lease) -> Checked {
    let before = world.truth.peek(&lease.id).await?;
    hold!(world.store.settle(lease, &failed(), KEPT).await? == OwnerOutcome::LeaseLost, "a stale owner settled");
    hold!(world.truth.peek(&lease.id).await? == before, "a stale owner changed the record");
    Ok(())
}

/// Checks that all clients get the same answer, byte for byte.
pub(crate) async fn is_replayed(world: &World, request: &Acquire) -> Checked {
    let truth = world.truth.acquire(&repeat_of(request)).await?;
    hold!(is_replay(&truth, &response()), "what was settled is not replayed: {truth:?}");
    for client in [&world.store, &world.rival] {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            let told = client.acquire(&repeat_of(request)).await?;
            if is_replay(&told, &response()) {
                break;
            }
            let is_late = world.lags() && matches!(told, AcquireOutcome::InProgress { .. });
            hold!(is_late && Instant::now() < give_up_at, "what was settled is not replayed: {told:?}");
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
    Ok(())
}
