//! The promises of each contract, as properties of every reachable situation.

use idem_core::{AcquireOutcome, ReplayKind};
use stateright::Property;

use super::leased::{Answer, Contract, Leased, Phase, Promised, Situation};
use super::world::Law;

type Promise = Property<Leased>;

pub(super) fn of(contract: Contract, promised: Promised) -> Vec<Promise> {
    match promised {
        Promised::AtMostOneEffect => vec![Promise::always(AT_MOST_ONE_EFFECT, at_most_one_effect)],
        Promised::Laws => laws(),
        Promised::All => {
            let mut promises = laws();
            promises.extend(answers());
            promises.extend(match contract {
                Contract::Transactional => transactional(),
                Contract::AtMostOnce => at_most_once(),
                Contract::AtLeastOnce => at_least_once(),
            });
            promises
        }
    }
}

const AT_MOST_ONE_EFFECT: &str = "there is one effect at most";

fn laws() -> Vec<Promise> {
    vec![
        Promise::always("L1: two live leases never exist", |_, situation| live_runs(situation) <= 1),
        Promise::always("L2: a settled record never changes", |_, situation| {
            situation.world.keeps(Law::SettledRecordsChange)
        }),
        Promise::always("L3: a stale owner changes nothing", |_, situation| {
            situation.world.keeps(Law::StaleOwnersChangeThings)
        }),
        Promise::always("L5: one lease later the key runs or answers", |model, situation| {
            use AcquireOutcome::{Acquired, Replay};
            matches!(situation.world.answer_after_one_lease(&model.requests), Acquired(_) | Replay(_))
        }),
        Promise::always("L7: attempts grow over the life of a record", |_, situation| {
            situation.world.keeps(Law::AttemptsDoNotGrow)
        }),
        Promise::always("L10: a record with a live lease counts and is not purged", |_, situation| {
            let counts = situation.world.peek().is_some() || !situation.world.live_lease();
            counts && situation.world.keeps(Law::LiveRecordsArePurged)
        }),
    ]
}

/// Properties that hold for clients under every contract, and checks that the situations of the promises occur.
fn answers() -> Vec<Promise> {
    vec![
        Promise::always("all final answers are the same", |_, situation| {
            let mut answers = situation.final_answers();
            answers.next().is_none_or(|first| answers.all(|answer| answer == first))
        }),
        Promise::always("an answer that it completed is true", |_, situation| {
            let told = situation.final_answers().any(|answer| answer.kind == ReplayKind::Completed);
            !told || !situation.effects.is_empty()
        }),
        Promise::sometimes("a completed run is replayed", |_, situation| {
            ended(
                situation,
                |answer| matches!(answer, Answer::Replayed(replay) if replay.kind == ReplayKind::Completed),
            )
        }),
        Promise::sometimes("a repeat is turned away while the first one runs", |_, situation| {
            live_runs(situation) == 1 && ended(situation, |answer| answer == Answer::Busy)
        }),
        Promise::sometimes("a worker crashes after its effect and before its settlement", |_, situation| {
            phases(situation).any(|phase| phase == Phase::CrashedAfterEffect)
        }),
    ]
}

fn transactional() -> Vec<Promise> {
    vec![
        Promise::always(AT_MOST_ONE_EFFECT, at_most_one_effect),
        Promise::always("no outcome is unknown", |_, situation| !unknown(situation)),
        Promise::always("one lease later the key is free, or answers with the effect", |model, situation| {
            match situation.world.answer_after_one_lease(&model.requests) {
                AcquireOutcome::Acquired(_) => situation.effects.is_empty(),
                AcquireOutcome::Replay(replay) => replay.kind == ReplayKind::Completed && situation.effects.len() == 1,
                _ => false,
            }
        }),
        took_over(),
        Promise::sometimes("two transactions are open at once", |_, situation| {
            phases(situation).filter(|phase| *phase == Phase::Affected).count() == 2
        }),
    ]
}

fn at_most_once() -> Vec<Promise> {
    vec![
        Promise::always(AT_MOST_ONE_EFFECT, at_most_one_effect),
        Promise::always("after an effect no run begins", |model, situation| {
            let answer = situation.world.answer_after_one_lease(&model.requests);
            situation.effects.is_empty() || matches!(answer, AcquireOutcome::Replay(_))
        }),
        Promise::sometimes("the outcome of an effect is unknown", |_, situation| {
            unknown(situation) && situation.effects.len() == 1
        }),
        Promise::sometimes("the outcome is unknown and there was no effect", |_, situation| {
            unknown(situation) && situation.effects.is_empty()
        }),
        Promise::sometimes("a late owner has its effect after its lease was taken", |_, situation| {
            unknown(situation) && phases(situation).any(|phase| phase == Phase::Affected)
        }),
    ]
}

fn at_least_once() -> Vec<Promise> {
    vec![
        Promise::always("no two effects share an attempt", attempts_differ),
        Promise::always("no outcome is unknown", |_, situation| !unknown(situation)),
        Promise::always("the last checkpoint reaches the next owner", |_, situation| {
            situation.world.keeps(Law::CheckpointsAreLost)
        }),
        took_over(),
        Promise::sometimes("there are two effects", |_, situation| situation.effects.len() == 2),
        // A reason to pass the fencing token on: the receiver can then refuse a stale effect.
        Promise::sometimes("a stale owner's effect comes after its successor's", |_, situation| {
            situation.effects.windows(2).any(|pair| pair[0] > pair[1])
        }),
        Promise::sometimes("the attempts are used up", |_, situation| {
            ended(situation, |answer| matches!(answer, Answer::Replayed(replay) if replay.kind == ReplayKind::Failed))
        }),
    ]
}

fn took_over() -> Promise {
    Promise::sometimes("a run takes over", |_, situation| {
        situation.workers.iter().any(|worker| worker.phase == Phase::Running && worker.attempt > 1)
    })
}

fn at_most_one_effect(_: &Leased, situation: &Situation) -> bool {
    situation.effects.len() <= 1
}

fn attempts_differ(_: &Leased, situation: &Situation) -> bool {
    let effects = &situation.effects;
    effects.iter().enumerate().all(|(at, attempt)| !effects[at + 1..].contains(attempt))
}

/// How many workers may execute, by the store's clock.
fn live_runs(situation: &Situation) -> usize {
    let live = |worker: &&super::leased::Worker| situation.world.step < worker.lease_until;
    situation.workers.iter().filter(live).count()
}

fn unknown(situation: &Situation) -> bool {
    situation.final_answers().any(|answer| answer.kind == ReplayKind::OutcomeUnknown)
}

fn phases(situation: &Situation) -> impl Iterator<Item = Phase> {
    situation.workers.iter().map(|worker| worker.phase)
}

fn ended(situation: &Situation, is: impl Fn(Answer) -> bool) -> bool {
    phases(situation).any(|phase| matches!(phase, Phase::Ended(answer) if is(answer)))
}
