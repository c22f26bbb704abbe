//! Whether what clients saw is what was promised.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::history::{Answer, Key, Operation, Payment, Word};
use crate::register::is_linearizable;

/// What is promised of each key.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a run has to say all of it")]
pub struct Promise {
    /// No key has two effects. Otherwise each further one comes from another attempt; that of a run that went on after its lease
    /// was over may come last.
    pub at_most_one_effect: bool,
    /// An outcome may be unknown for good, after a death.
    pub may_be_unknown: bool,
    /// So long after its end a run may be taken for one in progress, because a lock in front of the store is left over.
    pub stale_lock: Duration,
    /// Where a record is settled on its own, a store that does not take the settlement delays the answer by so long, and no
    /// longer: a run whose answer took this long may be one that is settled after it, or too late, when its outcome is unknown.
    pub settles_behind: Option<Behind>,
    /// So long after everything is well again each key has a definite answer.
    pub live_within: Duration,
    /// A success that was answered sooner than this is settled: no lease was over by then, and no settlement given up.
    pub lease: Duration,
}

/// What is known besides what clients saw.
#[derive(Debug, Clone, Default)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Known {
    /// The keys whose handler began at least once.
    pub begun: BTreeSet<Key>,
    /// From when to when an owner may have died, or an answer of a store may have been lost for as long as a lease. Of a stall
    /// that is only its beginning: what was sent later is not carried out before its end, and its lease begins then.
    pub losses: Vec<(Duration, Duration)>,
    /// From when to when leases may have been over too early, as the clock of a store was put forward.
    pub jumps: Vec<(Duration, Duration)>,
    /// From when to when stores stood still.
    pub stalls: Vec<(Duration, Duration)>,
}

/// What is promised of settlements that come after their answer.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a run has to say all of it")]
pub struct Behind {
    /// An answer that came sooner was settled before.
    pub patience: Duration,
    /// So long after its answer the run may be in progress still.
    pub delay: Duration,
}

impl Promise {
    /// How long after its end an operation that ran may be settled. A store that stands still takes nothing before its end.
    pub(crate) fn settled_late_by(&self, operation: &Operation, known: &Known) -> Duration {
        let Some(Behind { patience, delay }) = self.settles_behind else { return Duration::ZERO };
        if !operation.is_run() || operation.ended - operation.began < patience {
            return Duration::ZERO;
        }
        let stalled = known.stalls.iter().filter(|(from, until)| *from <= operation.ended && operation.ended <= *until);
        delay + stalled.map(|(_, until)| *until - operation.ended).max().unwrap_or_default()
    }
}

/// What was broken, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// Which key.
    pub key: Key,
    /// Which rule, and how.
    pub what: What,
}

/// The rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum What {
    /// More effects than promised.
    TwoEffects(usize),
    /// Two effects of one attempt.
    AttemptTwice,
    /// Successful answers that are not the same byte by byte.
    AnswersDiffer,
    /// Two runs answered for themselves where only one may have run.
    RanTwice,
    /// A success that has no effect.
    SuccessWithoutEffect,
    /// What was settled is something else later.
    SettledAnswerChanged,
    /// What was settled is in progress later.
    SettledAnswerVanished,
    /// Somebody else's payment.
    AnotherKeysAnswer,
    /// A payment of another amount than the one that was asked for.
    AnotherBodysAnswer,
    /// A request that is the one that was settled is told that it is another.
    FalseMismatch,
    /// An outcome that is unknown although nothing may be.
    OutcomeUnknown,
    /// An outcome that is unknown although no handler ever began, and no owner died.
    UnknownAndNeverRun,
    /// An effect of a later attempt than the one whose success was answered in time.
    EffectAfterSuccess,
    /// No definite answer in time.
    NoAnswer,
    /// The answers have no order in which each of them was true when it was given.
    NoOrder,
}

/// What a run must have seen to have shown anything.
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
    /// Effects of a second or later attempt, and outcomes that are unknown: what a dead owner left to others.
    pub takeovers: u64,
    /// Requests without an answer.
    pub unknown: u64,
    /// Keys that were asked for first while a store stood still.
    pub stalled: u64,
}

/// Checks a history against what really happened. `well_from` is when the last fault was over.
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
    // A run that lost its lease answers its own client, whatever its record says by then.
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

/// What was settled, as somebody was told, is settled for everybody who asks afterwards.
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

/// Whether the outcome of a key is unknown although nothing of it ever began. Who may have died with its key, and whose answer
/// may have been lost for as long as a lease, is not judged.
fn is_unknown_for_nothing(key: &Key, operations: &[&Operation], known: &Known, promise: Promise) -> bool {
    let is_unknown =
        |operation: &&&Operation| operation.answer.as_ref().is_some_and(|answer| answer.word() == Word::Unknown);
    let Some(told) = operations.iter().filter(is_unknown).map(|operation| operation.began).min() else { return false };
    let asked = || operations.iter().filter(|operation| operation.began <= told);
    // Who was answered otherwise may still let go of the key, or have a lease on it.
    let over =
        |operation: &Operation| operation.ended + if operation.began < told { promise.lease } else { Duration::ZERO };
    let met = |(from, until): &(Duration, Duration)| {
        asked().any(|operation| operation.began <= *until && over(operation) >= *from)
    };
    !known.begun.contains(key) && !known.losses.iter().any(met)
}

/// Whether a key has an effect of a later attempt than the one of which a client was told in time that it succeeded. A run
/// that took as long as a lease may have lost it, and what a store did not take for seconds is settled behind the answer.
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

/// Counts what a run has seen.
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
