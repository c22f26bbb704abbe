//! The suite can fail: the cases that are there for a bug find it, and so does the state-machine check.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::ManualClock;
use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Capabilities, Checkpoint, IdempotencyStore, Lease, LeaseRenewer, MemoryStore,
    OwnerOutcome, Purge, Record, RecordId, Settlement, SettlementListener, State, StoreError, StoredBody,
    StoredResponse, Takeover, Term, Timestamp,
};
use idem_testkit::{Subject, cases, conformance, state_machine};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bug {
    AcquireIgnoresTheLease,
    AcquireIgnoresTheFingerprint,
    AcquireIsNotAtomic,
    AcquireExtendsItsOwnLease,
    TakeoverRunsUnknownOutcomes,
    TakeoverForgetsTheCheckpoint,
    AttemptStaysOne,
    ReplayChangesTheBody,
    ReplaySortsHeaders,
    TombstoneBecomesEmpty,
    RenewIgnoresTheOwner,
    RenewDoesNothing,
    CheckpointIgnoresTheOwner,
    SettleIgnoresTheOwner,
    SettleAfterTheLeaseIsRefused,
    SettleRepeatedIsRefused,
    ReleaseKeepsTheRecord,
    PurgeRemovesLiveRecords,
    PurgeIgnoresItsLimit,
    PurgeRemovesNothing,
    IdsAreCutShort,
    PeekShowsNothing,
    TimeIsTheMachines,
}

/// The memory store behind a wrapper with one bug.
#[derive(Debug)]
struct Buggy {
    inner: MemoryStore,
    bug: Bug,
    seen: Mutex<Vec<RecordId>>,
}

impl Buggy {
    /// The lease with the record's present owner, as if the store did not check owners.
    async fn owned(&self, lease: &Lease) -> Result<Lease, StoreError> {
        let owner = self.inner.peek(&lease.id).await?.map_or(lease.owner, |record| record.owner);
        Ok(Lease { owner, ..lease.clone() })
    }

    fn mapped(&self, id: &RecordId) -> RecordId {
        let mut bytes = *id.as_bytes();
        if self.bug == Bug::IdsAreCutShort {
            bytes[31] = 0;
        }
        RecordId::from_bytes(bytes)
    }

    async fn disguise(&self, request: &mut Acquire) -> Result<(), StoreError> {
        match self.bug {
            Bug::AcquireIgnoresTheFingerprint => {
                let stored = self.inner.peek(&request.id).await?;
                request.fingerprint = stored.map_or(request.fingerprint, |record| record.fingerprint);
            }
            Bug::TakeoverRunsUnknownOutcomes => request.takeover = Takeover::Rerun,
            Bug::IdsAreCutShort => request.id = self.mapped(&request.id),
            _ => {}
        }
        Ok(())
    }

    async fn spoil(&self, request: &Acquire, before: Option<Record>, outcome: &mut AcquireOutcome) {
        let lease = |acquisition| Lease {
            id: request.id,
            fingerprint: request.fingerprint,
            owner: request.owner,
            attempt: 1,
            acquisition,
            checkpoint: None,
        };
        match (self.bug, outcome) {
            (Bug::AcquireIgnoresTheLease, outcome @ AcquireOutcome::InProgress { .. }) => {
                *outcome = AcquireOutcome::Acquired(lease(Acquisition::Takeover));
            }
            (Bug::AcquireIsNotAtomic, outcome @ AcquireOutcome::InProgress { .. }) if before.is_none() => {
                *outcome = AcquireOutcome::Acquired(lease(Acquisition::Fresh));
            }
            (Bug::AcquireExtendsItsOwnLease, AcquireOutcome::Acquired(lease)) => {
                self.inner.renew(lease, request.term).await.unwrap();
            }
            (Bug::TakeoverForgetsTheCheckpoint, AcquireOutcome::Acquired(lease)) => lease.checkpoint = None,
            (Bug::AttemptStaysOne, AcquireOutcome::Acquired(lease)) => lease.attempt = 1,
            (Bug::ReplayChangesTheBody, AcquireOutcome::Replay(replay)) => {
                if let StoredBody::Retained(body) = &mut replay.response.body {
                    *body = String::from_utf8_lossy(body).into_owned().into();
                }
            }
            (Bug::ReplaySortsHeaders, AcquireOutcome::Replay(replay)) => {
                let mut headers = replay.response.headers.to_vec();
                headers.sort_by(|left, right| left.name.cmp(&right.name));
                replay.response.headers = headers.into();
            }
            (Bug::TombstoneBecomesEmpty, AcquireOutcome::Replay(replay)) => {
                let body = replay.response.body.clone();
                let body = if body == StoredBody::NotRetained { StoredBody::Retained("".into()) } else { body };
                replay.response = StoredResponse { body, ..replay.response.clone() };
            }
            _ => {}
        }
    }
}

#[async_trait]
impl IdempotencyStore for Buggy {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let mut request = request.clone();
        self.disguise(&mut request).await?;
        self.seen.lock().unwrap().push(request.id);
        let before = self.inner.peek(&request.id).await?;
        if self.bug == Bug::AcquireIsNotAtomic {
            // All callers read before any of them writes.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let mut outcome = self.inner.acquire(&request).await?;
        self.spoil(&request, before, &mut outcome).await;
        Ok(outcome)
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        match self.bug {
            Bug::RenewIgnoresTheOwner => self.inner.renew(&self.owned(lease).await?, term).await,
            Bug::RenewDoesNothing => Ok(OwnerOutcome::Applied),
            _ => self.inner.renew(&Lease { id: self.mapped(&lease.id), ..lease.clone() }, term).await,
        }
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        match self.bug {
            Bug::CheckpointIgnoresTheOwner => self.inner.checkpoint(&self.owned(lease).await?, checkpoint).await,
            _ => self.inner.checkpoint(&Lease { id: self.mapped(&lease.id), ..lease.clone() }, checkpoint).await,
        }
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let before = self.inner.peek(&lease.id).await?;
        let running = before.as_ref().is_some_and(|record| matches!(record.state, State::InProgress { .. }));
        match self.bug {
            Bug::SettleIgnoresTheOwner => self.inner.settle(&self.owned(lease).await?, settlement, retention).await,
            Bug::SettleRepeatedIsRefused if !running => Ok(OwnerOutcome::LeaseLost),
            Bug::SettleAfterTheLeaseIsRefused if running && self.is_over(lease).await? => Ok(OwnerOutcome::LeaseLost),
            Bug::ReleaseKeepsTheRecord if *settlement == Settlement::Released => Ok(OwnerOutcome::Applied),
            _ => {
                let lease = Lease { id: self.mapped(&lease.id), ..lease.clone() };
                self.inner.settle(&lease, settlement, retention).await
            }
        }
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        match self.bug {
            Bug::PeekShowsNothing => Ok(None),
            _ => self.inner.peek(&self.mapped(id)).await,
        }
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.inner.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

impl Buggy {
    /// Whether the lease has run out, by the time that a fresh record carries.
    async fn is_over(&self, lease: &Lease) -> Result<bool, StoreError> {
        let Some(record) = self.inner.peek(&lease.id).await? else { return Ok(true) };
        let State::InProgress { lease_until, .. } = record.state else { return Ok(true) };
        let probe = idem_testkit::fixture::request();
        self.inner.acquire(&probe).await?;
        let now = self.inner.peek(&probe.id).await?.map(|record| record.created_at);
        Ok(now.is_some_and(|now| lease_until <= now))
    }
}

#[async_trait]
impl Purge for Buggy {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        match self.bug {
            Bug::PurgeIgnoresItsLimit => return self.inner.purge(NonZeroU32::MAX).await,
            Bug::PurgeRemovesNothing => return Ok(0),
            Bug::PurgeRemovesLiveRecords => {}
            _ => return self.inner.purge(limit).await,
        }
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        for id in seen {
            if let Some(record) = self.inner.peek(&id).await? {
                let lease = Lease {
                    id,
                    fingerprint: record.fingerprint,
                    owner: record.owner,
                    attempt: 1,
                    acquisition: Acquisition::Fresh,
                    checkpoint: None,
                };
                self.inner.settle(&lease, &Settlement::Released, Duration::ZERO).await?;
            }
        }
        self.inner.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}

async fn subject(bug: Bug) -> Subject {
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    let inner = match bug {
        Bug::TimeIsTheMachines => MemoryStore::new(NonZeroUsize::MAX),
        _ => MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone()),
    };
    let store = Arc::new(Buggy { inner, bug, seen: Mutex::default() });
    Subject::new(store.clone(), store, clock)
}

/// The cases that find the bug, by name.
fn failing_cases(bug: Bug) -> Vec<&'static str> {
    let fails =
        |case: idem_testkit::Case| std::panic::catch_unwind(|| conformance::run(|| subject(bug), case)).is_err();
    cases::ALL.iter().filter(|(_, case)| fails(*case)).map(|(name, _)| *name).collect()
}

fn assert_found(bug: Bug, expected: &[&str]) {
    let failing = failing_cases(bug);
    for case in expected {
        assert!(failing.contains(case), "{bug:?} was not found by {case}, but by {failing:?}");
    }
}

fn assert_diverges(bug: Bug) {
    let failure = state_machine::check(|| subject(bug), 2_000).expect_err("the state-machine check found nothing");
    let steps = failure.to_string().lines().filter(|line| line.starts_with("  Step")).count();
    // Sequences have up to 40 steps. Shrinking removes one at a time, and may end where no single one can go.
    assert!((1..=16).contains(&steps), "the failure was not shrunk: {failure}");
}

macro_rules! found {
    ($($name:ident: $bug:ident, [$($case:literal),+], $diverges:literal;)+) => {
        $(
            #[test]
            fn $name() {
                assert_found(Bug::$bug, &[$($case),+]);
                if $diverges {
                    assert_diverges(Bug::$bug);
                }
            }
        )+
    };
}

found! {
    an_acquire_that_ignores_the_lease_is_found: AcquireIgnoresTheLease,
        ["a_live_lease_turns_others_away", "one_of_many_first_requests_runs", "the_self_test_passes"], true;
    an_acquire_that_ignores_the_fingerprint_is_found: AcquireIgnoresTheFingerprint,
        ["a_mismatch_is_refused_once_settled", "every_bit_of_the_fingerprint_counts"], true;
    an_acquire_that_is_not_atomic_is_found: AcquireIsNotAtomic, ["one_of_many_first_requests_runs"], false;
    an_acquire_that_extends_its_own_lease_is_found: AcquireExtendsItsOwnLease,
        ["a_repeated_acquire_is_answered_as_the_first_time"], true;
    a_takeover_that_runs_unknown_outcomes_is_found: TakeoverRunsUnknownOutcomes,
        ["a_lease_over_becomes_an_unknown_outcome", "it_runs_again_only_if_both_say_so"], true;
    a_takeover_that_forgets_the_checkpoint_is_found: TakeoverForgetsTheCheckpoint,
        ["a_lease_that_is_over_is_taken_over", "a_retryable_failure_runs_again_at_its_time"], true;
    an_attempt_that_does_not_grow_is_found: AttemptStaysOne,
        ["the_attempt_grows_through_takeover_and_retry"], true;
    a_replay_that_changes_the_body_is_found: ReplayChangesTheBody,
        ["a_response_survives_byte_for_byte", "a_body_of_a_mebibyte_survives"], true;
    a_replay_that_sorts_header_fields_is_found: ReplaySortsHeaders,
        ["a_response_survives_byte_for_byte"], true;
    a_tombstone_that_becomes_an_empty_body_is_found: TombstoneBecomesEmpty,
        ["a_tombstone_is_not_an_empty_body"], true;
    a_renewal_without_an_owner_check_is_found: RenewIgnoresTheOwner,
        ["a_stranger_changes_nothing", "an_owner_that_was_taken_over_changes_nothing"], true;
    a_renewal_that_does_nothing_is_found: RenewDoesNothing,
        ["renew_moves_the_lease_to_count_from_now", "a_renewed_lease_turns_others_away_for_longer"], true;
    a_checkpoint_without_an_owner_check_is_found: CheckpointIgnoresTheOwner,
        ["a_stranger_changes_nothing", "an_owner_that_was_taken_over_changes_nothing"], true;
    a_settlement_without_an_owner_check_is_found: SettleIgnoresTheOwner,
        ["a_stranger_changes_nothing", "the_self_test_passes"], true;
    a_settlement_that_is_refused_after_the_lease_is_found: SettleAfterTheLeaseIsRefused,
        ["a_lease_that_ran_out_still_belongs_to_its_owner"], true;
    a_repeated_settlement_that_is_refused_is_found: SettleRepeatedIsRefused,
        ["a_repeated_settlement_is_answered_as_the_first_time", "a_repeated_release_is_answered_as_the_first_time"],
        true;
    a_release_that_keeps_the_record_is_found: ReleaseKeepsTheRecord,
        ["a_release_removes_the_record", "the_self_test_passes"], true;
    a_purge_that_removes_live_records_is_found: PurgeRemovesLiveRecords,
        ["purge_keeps_what_is_in_progress", "purge_keeps_what_was_renewed"], true;
    a_purge_that_ignores_its_limit_is_found: PurgeIgnoresItsLimit,
        ["purge_removes_what_is_over_up_to_its_limit"], false;
    a_purge_that_removes_nothing_is_found: PurgeRemovesNothing, ["purge_removes_what_is_over_up_to_its_limit"], false;
    ids_that_are_cut_short_are_found: IdsAreCutShort, ["every_bit_of_the_record_id_counts"], false;
    a_peek_that_shows_nothing_is_found: PeekShowsNothing, ["a_fresh_record_holds_what_was_asked"], false;
    a_store_on_the_machines_clock_is_found: TimeIsTheMachines,
        ["time_is_the_stores", "a_lease_that_is_over_is_taken_over"], true;
}
