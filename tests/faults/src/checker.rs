//! Checks that what clients saw is what the contract promised.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::history::{Answer, Key, Operation, Payment, Word};
use crate::register::is_linearizable;

/// The promise for each key.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a run has to say all of it")]
pub struct Promise {
    /// No key has two effects. If false, each further effect comes from another attempt, and a run that outlived its lease may
    /// write last.
    pub at_most_one_effect: bool,
    /// An outcome may stay unknown after the death of an owner.
    pub may_be_unknown: bool,
    /// How long after its end a run may still be reported as in progress, because of a stale lock in front of the store.
    pub stale_lock: Duration,
    /// The bounds of late settlements, if records are settled outside of the business transaction.
    ///
    /// A store that does not accept a settlement delays the answer by `patience` at most. A run whose answer took that long may
    /// be settled after its answer, or too late; then its outcome is unknown.
    pub settles_behind: Option<Behind>,
    /// How long after the last fault each key must have a definite answer.
    pub live_within: Duration,
    /// A success that was answered sooner than this is settled: no lease had expired, and no settlement was given up.
    pub lease: Duration,
}

/// What the checker knows besides the answers.
#[derive(Debug, Clone, Default)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Known {
    /// The keys whose handler began at least once.
    pub begun: BTreeSet<Key>,
    /// Spans in which an owner may have died, or a store's answer may have been lost for as long as a lease.
    ///
    /// Of a stall, only the beginning counts. The store executes later requests after the stall, and their leases begin then.
    pub losses: Vec<(Duration, Duration)>,
    /// Spans in which leases may have expired too early, because a store's clock was put forward.
    pub jumps: Vec<(Duration, Duration)>,
    /// Spans in which stores stood still.
    pub stalls: Vec<(Duration, Duration)>,
}

/// Bounds of settlements that come after their answer.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a run has to say all of it")]
pub struct Behind {
    /// An answer that came sooner was settled before it was sent.
    pub patience: Duration,
    /// How long after its answer the run may still be in progress.
    pub delay: Duration,
}

impl Promise {
    /// How long after its end a run may be settled. A stalled store accepts nothing before the stall ends.
    pub(crate) fn settled_late_by(&self, operation: &Operation, known: &Known) -> Duration {
        let Some(Behind { patience, delay }) = self.settles_behind else { return Duration::ZERO };
        if !operation.is_run() || operation.ended - operation.began < patience {
            return Duration::ZERO;
        }
        let stalled = known.stalls.iter().filter(|(from, until)| *from <= operation.ended && operation.ended <= *until);
        delay + stalled.map(|(_, until)| *until - operation.ended).max().unwrap_or_default()
    }
}

/// A broken rule, and the key that broke it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The key.
    pub key: Key,
    /// The rule, and how it was broken.
    pub what: What,
}

/// A rule that a history can break.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum What {
    /// More effects than promised.
    TwoEffects(usize),
    /// Two effects of one attempt.
    AttemptTwice,
    /// Successful answers that differ in some byte.
    AnswersDiffer,
    /// Two runs answered their own clients where only one may have run.
    RanTwice,
    /// A success without an effect.
    SuccessWithoutEffect,
    /// A settled answer changed later.
    SettledAnswerChanged,
    /// A settled key was in progress later.
    SettledAnswerVanished,
    /// An answer with the payment of another key.
    AnotherKeysAnswer,
    /// A payment of another amount than the request's.
    AnotherBodysAnswer,
    /// A mismatch for the very request that was settled.
    FalseMismatch,
    /// An unknown outcome where the contract allows none.
    OutcomeUnknown,
    /// An unknown outcome although no handler began and no owner died.
    UnknownAndNeverRun,
    /// An effect of a later attempt than one whose success was answered in time.
    EffectAfterSuccess,
    /// No definite answer in time.
    NoAnswer,
    /// No order of the answers makes each of them true when it was given.
    NoOrder,
}

/// Counts that show whether a run has tested enough.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Seen {
    /// Requests.
    pub operations: u64,
    /// First answers of successful runs.
    pub successes: u64,
    /// Answers that were replays.
    pub replays: u64,
    /// Answers to altered bodies.
    pub mismatches: u64,
    /// Answers while another run was in progress.
    pub in_progress: u64,
    /// Effects of second or later attempts, and unknown outcomes: what dead owners left.
    pub takeovers: u64,
    /// Requests without an answer.
    pub unknown: u64,
    /// Keys that were first requested while a store stood still.
    pub stalled: u64,
}

/// Checks a history against the effects and the promise. `well_from` is when the last fault ended.
#[must_use]
pub fn check(
    history: &[Operation],
    effects: &[Payment],
    known: &Known,
    promise: Promise,
    well_from: Duration,
) -> Vec<Violation> {
    let mut operations = BTreeMap::<&Key, Vec<&Operation>>::new();
    for operation in history {
        operations.entry(&operation.key).or_default().push(operation);
    }
    let mut made = BTreeMap::<&Key, Vec<&Payment>>::new();
    for effect in effects {
        made.entry(&effect.key).or_default().push(effect);
    }
    let keys: BTreeSet<&Key> = operations.keys().chain(made.keys()).copied().collect();
    let mut violations = Vec::new();
    for key in keys {
        let of_key = operations.get(key).map_or(&[][..], Vec::as_slice);
        let made = made.get(key).map_or(&[][..], Vec::as_slice);
        let mut broken = BTreeSet::new();
        effects_of_key(made, promise, &mut broken);
        answers_of_key(key, of_key, made, promise, &mut broken);
        order_of_key(of_key, known, promise, &mut broken);
        if is_unknown_for_nothing(key, of_key, known, promise) {
            broken.insert(What::UnknownAndNeverRun);
        }
        if !promise.at_most_one_effect && has_effect_after_success(of_key, made, known, promise) {
            broken.insert(What::EffectAfterSuccess);
        }
        if !is_answered(of_key, well_from, promise.live_within) {
            broken.insert(What::NoAnswer);
        }
        if !is_linearizable(of_key, known, promise) {
            broken.insert(What::NoOrder);
        }
        violations.extend(broken.into_iter().map(|what| Violation { key: key.clone(), what }));
    }
    violations
}

fn effects_of_key(made: &[&Payment], promise: Promise, broken: &mut BTreeSet<What>) {
    if promise.at_most_one_effect && made.len() > 1 {
        broken.insert(What::TwoEffects(made.len()));
    }
    let attempts: BTreeSet<_> = made.iter().map(|effect| effect.attempt).collect();
    if attempts.len() < made.len() {
        broken.insert(What::AttemptTwice);
    }
}

fn answers_of_key(
    key: &Key,
    operations: &[&Operation],
    made: &[&Payment],
    promise: Promise,
    broken: &mut BTreeSet<What>,
) {
    let answers = || operations.iter().filter_map(|operation| Some((*operation, operation.answer.as_ref()?)));
    let successes: Vec<_> = answers().filter(|(_, answer)| answer.status == 201).collect();
    for (operation, answer) in &successes {
        let Some(payment) = &answer.payment else { continue };
        if payment.key != *key {
            broken.insert(What::AnotherKeysAnswer);
        }
        if payment.amount != operation.amount {
            broken.insert(What::AnotherBodysAnswer);
        }
        if !made.iter().any(|effect| effect.id == payment.id) {
            broken.insert(What::SuccessWithoutEffect);
        }
    }
    if promise.at_most_one_effect && operations.iter().filter(|operation| operation.is_run()).count() > 1 {
        broken.insert(What::RanTwice);
    }
    // A run that lost its lease answers its own client, regardless of the record.
    let counted = |answer: &Answer| promise.at_most_one_effect || answer.is_replay;
    let digests: BTreeSet<_> =
        successes.iter().filter(|(_, answer)| counted(answer)).map(|(_, answer)| answer.digest).collect();
    if digests.len() > 1 {
        broken.insert(What::AnswersDiffer);
    }
    let replayed: BTreeSet<_> = answers()
        .filter(|(_, answer)| answer.is_replay || answer.word() == Word::Unknown)
        .filter(|(_, answer)| matches!(answer.word(), Word::Settled | Word::Unknown))
        .map(|(_, answer)| (answer.status, answer.digest))
        .collect();
    if replayed.len() > 1 {
        broken.insert(What::SettledAnswerChanged);
    }
    let settled: BTreeSet<_> = successes.iter().map(|(operation, _)| operation.amount).collect();
    let is_false = |(operation, answer): (&Operation, &Answer)| {
        answer.word() == Word::Mismatch && settled.contains(&operation.amount)
    };
    if answers().any(is_false) {
        broken.insert(What::FalseMismatch);
    }
    if !promise.may_be_unknown && answers().any(|(_, answer)| answer.word() == Word::Unknown) {
        broken.insert(What::OutcomeUnknown);
    }
}

/// Checks that a key whose settlement one client has seen is settled for every later request.
fn order_of_key(operations: &[&Operation], known: &Known, promise: Promise, broken: &mut BTreeSet<What>) {
    let word = |operation: &Operation| operation.answer.as_ref().map(Answer::word);
    let is_settled = |operation: &&&Operation| {
        // A run that lost its lease answers its own client, and settles nothing.
        let is_replay = operation.answer.as_ref().is_some_and(|answer| answer.is_replay);
        is_replay || (promise.at_most_one_effect && operation.is_run())
    };
    let settled = || operations.iter().filter(is_settled);
    let Some(told_at) = settled().map(|operation| operation.ended).min() else { return };
    let settled_at = settled().map(|operation| operation.ended + promise.settled_late_by(operation, known)).min();
    let settled_at = settled_at.unwrap_or(told_at);
    let after = |time: Duration| operations.iter().filter(move |operation| operation.began > time);
    if after(settled_at + promise.stale_lock).any(|operation| word(operation) == Some(Word::InProgress)) {
        broken.insert(What::SettledAnswerVanished);
    }
    if after(told_at).any(|operation| operation.is_run()) {
        broken.insert(What::RanTwice);
    }
}

/// Whether the outcome of a key is unknown although its handler never began.
///
/// A key is not judged if its owner may have died, or if a store's answer may have been lost for as long as a lease.
fn is_unknown_for_nothing(key: &Key, operations: &[&Operation], known: &Known, promise: Promise) -> bool {
    let is_unknown =
        |operation: &&&Operation| operation.answer.as_ref().is_some_and(|answer| answer.word() == Word::Unknown);
    let Some(told) = operations.iter().filter(is_unknown).map(|operation| operation.began).min() else { return false };
    let asked = || operations.iter().filter(|operation| operation.began <= told);
    // An operation with another answer may still be releasing the key, or hold a lease on it.
    let over =
        |operation: &Operation| operation.ended + if operation.began < told { promise.lease } else { Duration::ZERO };
    let met = |(from, until): &(Duration, Duration)| {
        asked().any(|operation| operation.began <= *until && over(operation) >= *from)
    };
    !known.begun.contains(key) && !known.losses.iter().any(met)
}

/// Whether a key has an effect of a later attempt than one whose success was answered in time.
///
/// A run that took as long as a lease may have lost it. A settlement that the store did not accept for seconds follows its
/// answer.
fn has_effect_after_success(operations: &[&Operation], made: &[&Payment], known: &Known, promise: Promise) -> bool {
    let jumped = |operation: &Operation| {
        known.jumps.iter().any(|(from, until)| operation.began <= *until && operation.ended >= *from)
    };
    let in_time = operations.iter().filter(|operation| {
        operation.is_run() && operation.ended - operation.began < promise.lease && !jumped(operation)
    });
    let told = in_time.filter_map(|operation| operation.answer.as_ref()?.payment.as_ref());
    let settled = told.filter_map(|told| made.iter().find(|made| made.id == told.id)).map(|made| made.attempt).min();
    settled.is_some_and(|settled| made.iter().any(|made| made.attempt > settled))
}

fn is_answered(operations: &[&Operation], well_from: Duration, within: Duration) -> bool {
    operations.iter().any(|operation| operation.ended <= well_from + within && operation.is_answered())
}

/// Counts what a run has shown.
#[must_use]
pub fn seen(history: &[Operation], effects: &[Payment], known: &Known) -> Seen {
    let mut seen = Seen { operations: history.len() as u64, ..Seen::default() };
    for operation in history {
        let Some(answer) = &operation.answer else {
            seen.unknown += 1;
            continue;
        };
        seen.replays += u64::from(answer.is_replay);
        match answer.word() {
            Word::Settled if !answer.is_replay => seen.successes += 1,
            Word::Unknown => seen.takeovers += 1,
            Word::Mismatch => seen.mismatches += 1,
            Word::InProgress => seen.in_progress += 1,
            Word::Settled | Word::Later => {}
        }
    }
    let mut first = BTreeMap::<&Key, Duration>::new();
    for operation in history {
        let began = first.entry(&operation.key).or_insert(operation.began);
        *began = operation.began.min(*began);
    }
    let is_within = |began: &&Duration| known.stalls.iter().any(|(from, until)| from <= *began && *began <= until);
    seen.stalled = first.values().filter(is_within).count() as u64;
    seen.takeovers += effects.iter().filter(|effect| effect.attempt > 1).count() as u64;
    seen
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "tenant {} key {}: {:?}", self.key.tenant, self.key.key, self.what)
    }
}

#[cfg(test)]
mod tests;
