//! Reads and changes records. One statement does the common case. In other cases the store reads the record, the state
//! machine decides, and the row is replaced if it is still the same (optimistic locking).

use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, AcquireOutcome, Lease, LeaseRenewer, OwnerAction, OwnerOutcome, OwnerToken, Record, RecordId, Refusal,
    Resolve, ResolveOutcome, StoreError, StoreErrorKind, Term, TimeOffset, machine,
};

use crate::batch::batcher::Batcher;
use crate::batch::verb::{Lookup, Presence, ReplaceOutcome, Verb, VerbOutcome, VersionedRecord, unexpected_answer};
use crate::schema::name::IdentifiedSchema;

/// How often a decision is repeated because another session has changed the record. Each time another session makes progress, so
/// this many in a row are not chance.
pub(crate) const ROUNDS: u32 = 16;

/// The answer while a transaction runs the operation. It has no lease: the key is free or answered when the transaction ends, at
/// an unknown time.
pub(crate) const IN_PROGRESS: AcquireOutcome =
    AcquireOutcome::InProgress { lease_left: Duration::from_secs(1), age: Duration::ZERO };

/// The records of one schema.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) batcher: Batcher,
    pub(crate) schema: IdentifiedSchema,
    pub(crate) offset: TimeOffset,
}

impl Records {
    /// The same records over a separate connection, which the current runtime drives.
    pub(crate) fn on_current_runtime(&self) -> Self {
        Self { batcher: self.batcher.another(), schema: self.schema.clone(), offset: self.offset.clone() }
    }

    pub(crate) async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let lock = self.schema.lock(&request.id);
        for _ in 0..ROUNDS {
            let Lookup { now, presence, row } = self.lookup(Verb::Acquire { request: request.clone(), lock }).await?;
            let before = row.as_ref().map(|row| &row.record);
            if let Some(row) = &row
                && row.record.is_erased()
                && machine::current(before, now).is_none()
            {
                // Its principal may be erased, and a replacement would keep it so.
                self.replace(request.id, None, row, None).await.map_err(StoreError::with_existing_record)?;
                continue;
            }
            let (next, outcome) = machine::acquire(before, request, now);
            if row.is_none() {
                match presence {
                    // The statement created the record that the state machine decides on.
                    Presence::Created => return Ok(outcome),
                    Presence::Running => return Ok(IN_PROGRESS),
                    // Another session created it at the same moment.
                    Presence::Present | Presence::Absent => continue,
                }
            }
            if next.as_ref() == before {
                match outcome {
                    AcquireOutcome::Acquired(_) => match self.acquired_before(request).await? {
                        Some(outcome) => return Ok(outcome),
                        None => continue,
                    },
                    outcome => return Ok(outcome),
                }
            }
            if let Some(outcome) = self.replace_and_answer(request, row, next, outcome).await? {
                return Ok(outcome);
            }
        }
        Err(contended())
    }

    /// Reads the record, and, if `lock` is given, whether a transaction runs the operation.
    pub(crate) async fn read(&self, id: RecordId, lock: Option<i64>) -> Result<Lookup, StoreError> {
        self.lookup(Verb::Lookup { id, lock, confirmed: false }).await
    }

    /// Like [`read`](Self::read), and also confirms that every standby that commits wait for has what is read. It finds out
    /// whether an unanswered write was committed.
    ///
    /// A commit that waits for a standby is not visible. If its session is terminated or the server restarts, it becomes visible
    /// although no standby has it, and a failover would lose it.
    pub(crate) async fn read_confirmed(&self, id: RecordId, lock: Option<i64>) -> Result<Lookup, StoreError> {
        self.lookup(Verb::Lookup { id, lock, confirmed: true }).await.map_err(StoreError::indeterminate)
    }

    async fn lookup(&self, verb: Verb) -> Result<Lookup, StoreError> {
        match self.batcher.run(verb).await? {
            VerbOutcome::Found(lookup) => Ok(lookup),
            _ => Err(unexpected_answer()),
        }
    }

    /// Replaces `row` by `next`, which was decided on it. `lock` is given when `next` begins a run.
    async fn replace(
        &self,
        id: RecordId,
        lock: Option<i64>,
        row: &VersionedRecord,
        next: Option<&Record>,
    ) -> Result<ReplaceOutcome, StoreError> {
        let version = row.version;
        let verb = match next {
            Some(next) => Verb::Replace { id, lock, version, record: Box::new(FlatRecord::from(next)) },
            None => Verb::Remove { id, version },
        };
        match self.batcher.run(verb).await? {
            VerbOutcome::Replaced(outcome) => Ok(outcome),
            _ => Err(unexpected_answer()),
        }
    }

    /// Replaces `row` by `next`, and answers `outcome`; `None` if the row has changed meanwhile.
    pub(crate) async fn replace_and_answer(
        &self,
        request: &Acquire,
        row: Option<Box<VersionedRecord>>,
        next: Option<Record>,
        outcome: AcquireOutcome,
    ) -> Result<Option<AcquireOutcome>, StoreError> {
        let Some(row) = row else { return Ok(Some(outcome)) };
        let lock = self.schema.lock(&request.id);
        let replaced = self.replace(request.id, Some(lock), &row, next.as_ref()).await;
        Ok(match replaced.map_err(StoreError::with_existing_record)? {
            ReplaceOutcome::Done => Some(outcome),
            ReplaceOutcome::Running => Some(IN_PROGRESS),
            ReplaceOutcome::Changed => None,
        })
    }

    /// The answer to an acquire that an earlier try has done; `None` if the record has changed since.
    async fn acquired_before(&self, request: &Acquire) -> Result<Option<AcquireOutcome>, StoreError> {
        let Lookup { now, row, .. } = self.read_confirmed(request.id, None).await?;
        let before = row.as_ref().map(|row| &row.record);
        let (next, outcome) = machine::acquire(before, request, now);
        Ok((before.is_some() && next.as_ref() == before).then_some(outcome))
    }

    /// Applies the action of an owner. One statement does the common case; if it does not apply, the state machine says why, or
    /// decides.
    pub(crate) async fn apply(
        &self,
        id: RecordId,
        owner: OwnerToken,
        action: OwnerAction<'_>,
    ) -> Result<OwnerOutcome, StoreError> {
        if owner != OwnerToken::NOBODY {
            match self.batcher.run(Verb::of_owner(id, owner, action)).await? {
                VerbOutcome::Applied(true) => return Ok(OwnerOutcome::Applied),
                VerbOutcome::Applied(false) => {}
                _ => return Err(unexpected_answer()),
            }
        }
        for _ in 0..ROUNDS {
            // An earlier try may have done it.
            let Lookup { now, row, .. } = self.read_confirmed(id, None).await?;
            let before = row.as_ref().map(|row| &row.record);
            let (next, outcome) = machine::apply(before, owner, action, now);
            let Some(row) = &row else { return Ok(outcome) };
            if next.as_ref() == machine::current(before, now) {
                return Ok(outcome);
            }
            if self.replace(id, None, row, next.as_ref()).await? == ReplaceOutcome::Done {
                return Ok(outcome);
            }
        }
        Err(contended())
    }

    /// Resolves an operation. One that a transaction runs is live, whatever its record says.
    pub(crate) async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        const LIVE: ResolveOutcome = ResolveOutcome::Refused(Refusal::Live);
        let lock = self.schema.lock(&request.id);
        for _ in 0..ROUNDS {
            // An earlier try may have done it.
            let Lookup { now, presence, row } = self.read_confirmed(request.id, Some(lock)).await?;
            let before = row.as_ref().map(|row| &row.record);
            let (next, outcome) = machine::resolve(before, request, now);
            let Some(row) = &row else { return Ok(outcome) };
            if next.as_ref() == machine::current(before, now) {
                return Ok(outcome);
            }
            if presence == Presence::Running {
                return Ok(LIVE);
            }
            match self.replace(request.id, Some(lock), row, next.as_ref()).await? {
                ReplaceOutcome::Done => return Ok(outcome),
                ReplaceOutcome::Running => return Ok(LIVE),
                ReplaceOutcome::Changed => {}
            }
        }
        Err(contended())
    }
}

#[async_trait]
impl LeaseRenewer for Records {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.apply(lease.id, lease.owner, OwnerAction::Renew(term)).await
    }
}

/// The error when other sessions were faster in every round.
pub(crate) fn contended() -> StoreError {
    let message = format!("a record changed {ROUNDS} times while a decision on it was made");
    StoreError::new(StoreErrorKind::Unavailable, message)
}
