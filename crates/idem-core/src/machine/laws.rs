//! The laws, asserted over arbitrary histories of one record.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::fingerprint::Fingerprint;
use crate::record::{Checkpoint, Failure, OwnerToken, State, StoredResponse, Takeover};
use crate::{IdempotencyKey, RecordId, RecordIdentity, RecordState, Scope};

/// `PROPTEST_CASES` sets how many histories each law is tried on.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000);
    ProptestConfig { cases, ..ProptestConfig::default() }
}

/// A command that owns its parts, and the pause before it.
#[derive(Debug, Clone)]
struct Step {
    pause: Duration,
    command: Owned,
}

#[derive(Debug, Clone)]
enum Owned {
    Acquire(Acquire),
    Renew(OwnerToken, Term),
    Checkpoint(OwnerToken, Checkpoint),
    Settle(OwnerToken, Settlement, Duration),
    /// Of the record as it is, or of one that was never there.
    Resolve(Resolve, bool),
    Erase(Erase, bool),
}

impl Owned {
    fn borrow(&self) -> Command<'_> {
        match self {
            Self::Acquire(request) => Command::Acquire(request),
            Self::Renew(owner, term) => Command::Owner(*owner, OwnerAction::Renew(*term)),
            Self::Checkpoint(owner, checkpoint) => Command::Owner(*owner, OwnerAction::Checkpoint(checkpoint)),
            Self::Settle(owner, settlement, retention) => {
                Command::Owner(*owner, OwnerAction::Settle(settlement, *retention))
            }
            Self::Resolve(request, _) => Command::Resolve(request),
            Self::Erase(request, _) => Command::Erase(request),
        }
    }
}

/// One command and what came of it. `before` is the record that still counted when the command came.
#[derive(Debug)]
struct Seen {
    now: Timestamp,
    before: Option<Record>,
    command: Owned,
    after: Option<Record>,
    outcome: Outcome,
}

fn history(start: Timestamp, steps: &[Step]) -> Vec<Seen> {
    let mut now = start;
    let mut record: Option<Record> = None;
    let run = |step: &Step| {
        now = now.saturating_add(step.pause);
        let before = current(record.as_ref(), now).cloned();
        let mut command = step.command.clone();
        if let (Owned::Resolve(request, true), Some(before)) = (&mut command, &before) {
            request.seen = before.version();
        }
        if let (Owned::Erase(request, true), Some(before)) = (&mut command, &before) {
            request.seen = before.version();
        }
        let (after, outcome) = transition(record.as_ref(), command.borrow(), now);
        record.clone_from(&after);
        Seen { now, before, command, after, outcome }
    };
    steps.iter().map(run).collect()
}

/// Few and small values, so that steps meet boundaries exactly and owners meet each other. Never zero: a record without
/// a retention is gone before its settlement can be repeated.
fn duration() -> impl Strategy<Value = Duration> {
    (1..=6_u64).prop_map(Duration::from_secs)
}

fn owner() -> impl Strategy<Value = OwnerToken> {
    (1..=3_u8).prop_map(|number| OwnerToken::from_bytes([number; 16]))
}

fn term() -> impl Strategy<Value = Term> {
    (duration(), duration()).prop_map(|(lease, retention)| Term { lease, retention })
}

fn response() -> impl Strategy<Value = StoredResponse> {
    (prop_oneof![Just(200_u16), Just(500)], "[ab]").prop_map(|(status, body)| StoredResponse::new(status, body))
}

fn request() -> impl Strategy<Value = Acquire> {
    let takeover = prop_oneof![3 => Just(Takeover::Rerun), 1 => Just(Takeover::Unknown), 1 => Just(Takeover::Probe)];
    let on_mismatch = prop_oneof![Just(OnMismatch::Refuse), Just(OnMismatch::ReplayOriginal)];
    let fingerprint = prop_oneof![5 => Just("a"), 1 => Just("b")];
    (owner(), term(), takeover, on_mismatch, fingerprint, 1..=4_u32).prop_map(
        |(owner, term, takeover, on_mismatch, body, max_attempts)| Acquire {
            id: RecordId::from_bytes([0; 32]),
            origin: Origin { namespace: "laws".into(), scope: Scope::single_tenant("op") },
            trace: None,
            fingerprint: Fingerprint::of_bytes("op", body.as_bytes()),
            owner,
            term,
            takeover,
            max_attempts: NonZeroU32::new(max_attempts).unwrap(),
            on_mismatch,
        },
    )
}

fn settlement() -> impl Strategy<Value = Settlement> {
    prop_oneof![
        response().prop_map(Settlement::Completed),
        response().prop_map(Settlement::FailedTerminal),
        (response(), 0..=4_u64).prop_map(|(response, seconds)| Settlement::FailedRetryable {
            response,
            retry_after: Duration::from_secs(seconds),
        }),
        Just(Settlement::OutcomeUnknown),
        Just(Settlement::Released),
    ]
}

fn resolving() -> impl Strategy<Value = Owned> {
    let resolution = prop_oneof![
        response().prop_map(Resolution::Completed),
        response().prop_map(Resolution::FailedTerminal),
        (response(), 0..=4_u64).prop_map(|(response, seconds)| Resolution::FailedRetryable {
            response,
            retry_after: Duration::from_secs(seconds),
        }),
        Just(Resolution::OutcomeUnknown),
    ];
    let action = (7..=8_u8).prop_map(|number| OwnerToken::from_bytes([number; 16]));
    (action, resolution, duration(), prop::bool::weighted(0.8)).prop_map(
        |(action, resolution, retention, is_current)| {
            let seen = "0".repeat(32).parse().unwrap();
            let id = RecordId::from_bytes([0; 32]);
            Owned::Resolve(Resolve { id, action, seen, resolution, retention }, is_current)
        },
    )
}

fn erasing() -> impl Strategy<Value = Owned> {
    let action = (6..=7_u8).prop_map(|number| OwnerToken::from_bytes([number; 16]));
    (action, prop::bool::weighted(0.8)).prop_map(|(action, is_current)| {
        let (id, seen) = (RecordId::from_bytes([0; 32]), "0".repeat(32).parse().unwrap());
        Owned::Erase(Erase { id, action, seen, principal: None }, is_current)
    })
}

fn step() -> impl Strategy<Value = Step> {
    let checkpoint = (0..=2_u32, "[xy]").prop_map(|(sequence, name)| Checkpoint {
        sequence,
        name: name.into(),
        data: "data".into(),
    });
    let command = prop_oneof![
        4 => request().prop_map(Owned::Acquire),
        1 => (owner(), term()).prop_map(|(owner, term)| Owned::Renew(owner, term)),
        1 => (owner(), checkpoint).prop_map(|(owner, checkpoint)| Owned::Checkpoint(owner, checkpoint)),
        2 => (owner(), settlement(), duration())
            .prop_map(|(owner, settlement, retention)| Owned::Settle(owner, settlement, retention)),
        1 => resolving(),
        1 => erasing(),
    ];
    (0..=4_u64, command).prop_map(|(seconds, command)| Step { pause: Duration::from_secs(seconds), command })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..40)
}

/// Any moment, any pause, any term: what no clock would give, but a corrupt row might.
fn extreme_steps() -> impl Strategy<Value = Vec<Step>> {
    let extreme =
        || prop_oneof![Just(Duration::ZERO), Just(Duration::MAX), any::<u64>().prop_map(Duration::from_micros)];
    let step = (step(), extreme(), extreme(), extreme()).prop_map(|(mut step, pause, lease, retention)| {
        let extreme = Term { lease, retention };
        step.pause = pause;
        match &mut step.command {
            Owned::Acquire(request) => request.term = extreme,
            Owned::Renew(_, term) => *term = extreme,
            Owned::Checkpoint(..) | Owned::Erase(..) => {}
            Owned::Settle(_, settlement, kept) => {
                *kept = retention;
                if let Settlement::FailedRetryable { retry_after, .. } = settlement {
                    *retry_after = lease;
                }
            }
            Owned::Resolve(request, _) => {
                request.retention = retention;
                if let Resolution::FailedRetryable { retry_after, .. } = &mut request.resolution {
                    *retry_after = lease;
                }
            }
        }
        step
    });
    prop::collection::vec(step, 1..20)
}

fn lease_until(record: &Record) -> Option<Timestamp> {
    match record.state {
        State::InProgress { lease_until, .. } => Some(lease_until),
        State::Completed { .. } | State::Failed { .. } => None,
    }
}

/// The response of a record that never runs again.
fn final_response(record: &Record) -> Option<&StoredResponse> {
    match &record.state {
        State::Completed { response } => Some(response),
        State::Failed { failure: Failure::Terminal | Failure::OutcomeUnknown, response } => Some(response),
        State::InProgress { .. } | State::Failed { failure: Failure::Retryable { .. }, .. } => None,
    }
}

fn acquired(seen: &Seen) -> Option<&Lease> {
    match &seen.outcome {
        Outcome::Acquire(AcquireOutcome::Acquired(lease)) => Some(lease),
        _ => None,
    }
}

/// The owner token of a command that is not an acquire.
fn actor(command: &Owned) -> Option<OwnerToken> {
    match command {
        Owned::Acquire(_) | Owned::Resolve(..) | Owned::Erase(..) => None,
        Owned::Renew(owner, _) | Owned::Checkpoint(owner, _) | Owned::Settle(owner, ..) => Some(*owner),
    }
}

fn shifted(record: &Record, by: Duration) -> Record {
    let shift = |time: Timestamp| time.saturating_add(by);
    let mut record = record.clone();
    record.created_at = shift(record.created_at);
    record.updated_at = shift(record.updated_at);
    record.expires_at = shift(record.expires_at);
    match &mut record.state {
        State::InProgress { lease_until, .. } => *lease_until = shift(*lease_until),
        State::Failed { failure: Failure::Retryable { not_before }, .. } => *not_before = shift(*not_before),
        State::Completed { .. } | State::Failed { .. } => {}
    }
    record
}

const START: Timestamp = Timestamp::from_unix_micros(1_000_000_000);

proptest! {
    #![proptest_config(config())]

    #[test]
    fn l1_at_most_one_owner_is_current_and_live_leases_never_overlap(steps in steps()) {
        // The holder by the outcomes alone: the owner of the last `Acquired`.
        let mut holder: Option<OwnerToken> = None;
        for seen in history(START, &steps) {
            let before = seen.before.as_ref();
            if let Some(lease) = acquired(&seen) {
                let live = before.filter(|before| before.owner != lease.owner).and_then(lease_until);
                prop_assert!(live.is_none_or(|until| until <= seen.now), "two live leases: {seen:?}");
                holder = Some(lease.owner);
            }
            if let (Some(actor), Some(before)) = (actor(&seen.command), before)
                && before.owner != OwnerToken::NOBODY
                && seen.outcome == Outcome::Owner(OwnerOutcome::Applied)
            {
                prop_assert_eq!(holder, Some(actor));
            }
        }
    }

    #[test]
    fn l2_a_settled_record_never_changes_and_its_replays_are_identical(steps in steps()) {
        for seen in history(START, &steps) {
            let Some(before) = &seen.before else { continue };
            let Some(response) = final_response(before) else { continue };
            if seen.outcome == Outcome::Resolve(ResolveOutcome::Resolved) && Some(before) != seen.after.as_ref() {
                let is_unknown = matches!(before.state, State::Failed { failure: Failure::OutcomeUnknown, .. });
                prop_assert!(is_unknown, "only an unknown outcome is resolved: {seen:?}");
                continue;
            }
            if let (Outcome::Erase(EraseOutcome::Erased), Some(after)) = (&seen.outcome, &seen.after) {
                let name = |record: &Record| RecordState::of(record).name();
                let status = final_response(after).map(|response| response.status);
                prop_assert_eq!((name(before), Some(response.status)), (name(after), status), "a tombstone stays");
                prop_assert!(after.is_erased() && (before.expires_at, before.attempt) == (after.expires_at, after.attempt));
                continue;
            }
            prop_assert_eq!(Some(before), seen.after.as_ref());
            if let Outcome::Acquire(AcquireOutcome::Replay(replay)) = &seen.outcome {
                prop_assert_eq!(&replay.response, response);
                prop_assert_eq!(replay.settled_at, before.updated_at);
            }
        }
    }

    #[test]
    fn l3_a_stale_owner_changes_nothing(steps in steps()) {
        for seen in history(START, &steps) {
            let (Some(actor), Some(before)) = (actor(&seen.command), &seen.before) else { continue };
            if before.owner != actor {
                prop_assert_eq!(Some(before), seen.after.as_ref());
                let given_back = before.owner == OwnerToken::NOBODY;
                let released = matches!(seen.command, Owned::Settle(_, Settlement::Released, _));
                let applied = seen.outcome == Outcome::Owner(OwnerOutcome::Applied);
                prop_assert_eq!(applied, given_back && released, "only a repeated release is answered as before");
            }
            if seen.outcome == Outcome::Owner(OwnerOutcome::LeaseLost) {
                prop_assert_eq!(Some(before), seen.after.as_ref());
            }
        }
    }

    #[test]
    fn l4_a_different_fingerprint_neither_runs_nor_receives_the_response(steps in steps()) {
        for seen in history(START, &steps) {
            let (Owned::Acquire(request), Some(before)) = (&seen.command, &seen.before) else { continue };
            if before.fingerprint == request.fingerprint {
                let mismatched = matches!(seen.outcome, Outcome::Acquire(AcquireOutcome::Mismatch { .. }));
                prop_assert!(!mismatched, "{seen:?}");
                continue;
            }
            prop_assert_eq!(Some(before), seen.after.as_ref());
            match &seen.outcome {
                Outcome::Acquire(AcquireOutcome::Mismatch { .. }) => {}
                Outcome::Acquire(AcquireOutcome::Replay(_)) => {
                    prop_assert_eq!(request.on_mismatch, OnMismatch::ReplayOriginal);
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }

    #[test]
    fn l5_after_a_crash_the_key_is_free_or_answered_one_lease_later(steps in steps(), mut next in request()) {
        next.owner = OwnerToken::from_bytes([9; 16]);
        for seen in history(START, &steps) {
            let Some(record) = &seen.after else { continue };
            let Some(until) = lease_until(record) else { continue };
            next.fingerprint = record.fingerprint;
            let outcome = acquire(Some(record), &next, until).1;
            let free = matches!(outcome, AcquireOutcome::Acquired(_) | AcquireOutcome::Replay(_));
            prop_assert!(free, "stuck: {outcome:?}");
        }
    }

    #[test]
    fn l6_different_scopes_and_keys_have_different_records(
        (one, one_key, other, other_key) in (scope(), key(), scope(), key())
    ) {
        let identity = RecordIdentity::new("laws");
        let same = one == other && one_key == other_key;
        prop_assert_eq!(identity.record_id(&one, &one_key) == identity.record_id(&other, &other_key), same);
    }

    #[test]
    fn l7_the_attempt_strictly_grows_over_the_life_of_a_record(steps in steps()) {
        for seen in history(START, &steps) {
            if let (Some(before), Some(after)) = (&seen.before, &seen.after) {
                prop_assert!(before.attempt <= after.attempt);
                let is_resolved = seen.outcome == Outcome::Resolve(ResolveOutcome::Resolved);
                let is_operated = is_resolved || seen.outcome == Outcome::Erase(EraseOutcome::Erased);
                prop_assert!(!is_operated || before.attempt == after.attempt);
                let same_owner = is_operated || before.owner == after.owner || after.owner == OwnerToken::NOBODY;
                prop_assert!(same_owner || before.attempt < after.attempt);
            }
            let Some(lease) = acquired(&seen) else { continue };
            let repeated = seen.before == seen.after;
            let expected = match &seen.before {
                None => 1,
                Some(before) if repeated => before.attempt,
                Some(before) => before.attempt + 1,
            };
            prop_assert_eq!(lease.attempt, expected);
        }
    }

    #[test]
    fn l8_every_verb_can_be_repeated(steps in steps()) {
        for seen in history(START, &steps) {
            let (after, outcome) = transition(seen.after.as_ref(), seen.command.borrow(), seen.now);
            prop_assert_eq!(&after, &seen.after);
            prop_assert_eq!(&outcome, &seen.outcome);
        }
    }

    #[test]
    fn l9_only_differences_of_the_stores_time_matter(steps in steps(), seconds in 1..1_000_000_u64) {
        let by = Duration::from_secs(seconds);
        let later = history(START.saturating_add(by), &steps);
        for (seen, later) in history(START, &steps).iter().zip(&later) {
            prop_assert_eq!(seen.after.as_ref().map(|record| shifted(record, by)), later.after.clone());
            match (&seen.outcome, &later.outcome) {
                (
                    Outcome::Acquire(AcquireOutcome::Replay(replay)),
                    Outcome::Acquire(AcquireOutcome::Replay(later)),
                ) => {
                    let settled_at = replay.settled_at.saturating_add(by);
                    prop_assert_eq!(&Replay { settled_at, ..replay.clone() }, later);
                }
                (outcome, later) => prop_assert_eq!(outcome, later),
            }
        }
    }

    #[test]
    fn a_live_lease_is_never_resolved_and_a_crashed_run_stays_fenced_off(steps in steps()) {
        for seen in history(START, &steps) {
            let Owned::Resolve(request, _) = &seen.command else { continue };
            let is_done = seen.outcome == Outcome::Resolve(ResolveOutcome::Resolved);
            prop_assert!(is_done || seen.before == seen.after, "a refusal changes nothing");
            let Some(before) = seen.before.as_ref().filter(|_| is_done) else { continue };
            prop_assert!(lease_until(before).is_none_or(|until| until <= seen.now));
            prop_assert_eq!(seen.after.as_ref().map(|after| after.owner), Some(request.action));
        }
    }

    #[test]
    fn l10_a_record_outlives_its_lease_at_any_time(start in any::<i64>(), steps in extreme_steps()) {
        for seen in history(Timestamp::from_unix_micros(start), &steps) {
            let Some(record) = &seen.after else { continue };
            prop_assert!(lease_until(record).is_none_or(|until| until <= record.expires_at), "{record:?}");
        }
    }
}

/// Bytes that break encodings which join strings: separators, quotes, NUL, letters of several bytes.
fn scope() -> impl Strategy<Value = Scope> {
    let text =
        || prop::collection::vec(prop::sample::select(vec!["", "a", ":", "/", "\0", "'", "\"", "é", "\u{1}"]), 0..3);
    (prop::option::of(text()), text()).prop_map(|(principal, operation)| match principal {
        Some(principal) => Scope::new(principal.concat(), operation.concat()),
        None => Scope::single_tenant(operation.concat()),
    })
}

fn key() -> impl Strategy<Value = IdempotencyKey> {
    "[a:/'\"]{1,3}".prop_map(|key| key.parse().unwrap())
}
