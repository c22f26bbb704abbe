//! Tests with a correct history, and with every violation that the checker must find.

use super::*;

const KEY: Key = Key { tenant: 1, key: 7 };

const ONCE: Promise = Promise {
    at_most_one_effect: true,
    may_be_unknown: false,
    stale_lock: Duration::ZERO,
    settles_behind: None,
    live_within: Duration::from_secs(5),
    lease: Duration::from_secs(2),
};

const OFTEN: Promise = Promise { at_most_one_effect: false, ..ONCE };

fn payment(id: &str, attempt: u32) -> Payment {
    Payment { id: id.to_owned(), key: KEY, amount: 10, attempt }
}

fn paid(id: &str, is_replay: bool) -> Answer {
    Answer { status: 201, is_replay, problem: None, digest: id.len() as u64, payment: Some(payment(id, 1)) }
}

fn problem(status: u16, kind: &str) -> Answer {
    Answer { status, is_replay: false, problem: Some(kind.to_owned()), digest: 0, payment: None }
}

/// The handler began, and no fault occurred.
fn known_to_run() -> Known {
    Known { begun: BTreeSet::from([KEY]), ..Known::default() }
}

/// One request per second.
fn history(answers: impl IntoIterator<Item = Option<Answer>>) -> Vec<Operation> {
    let operation = |(at, answer)| Operation {
        key: KEY,
        amount: 10,
        began: Duration::from_secs(at),
        ended: Duration::from_millis(at * 1000 + 500),
        answer,
    };
    (0..).zip(answers).map(operation).collect()
}

/// Broken rules other than the order, which breaks together with most rules and has separate tests.
fn found(history: &[Operation], effects: &[Payment], promise: Promise) -> Vec<What> {
    let found =
        check(history, effects, &known_to_run(), promise, Duration::ZERO).into_iter().map(|violation| violation.what);
    found.filter(|what| *what != What::NoOrder).collect()
}

fn has_order(history: &[Operation], promise: Promise) -> bool {
    !check(history, &[], &known_to_run(), promise, Duration::ZERO)
        .iter()
        .any(|violation| violation.what == What::NoOrder)
}

/// Broken rules for these answers and one payment.
fn lie(promise: Promise, answers: impl IntoIterator<Item = Answer>) -> Vec<What> {
    found(&history(answers.into_iter().map(Some)), &[payment("a", 1)], promise)
}

#[test]
fn a_history_as_promised_has_nothing_to_find() {
    let answers = [
        None,
        Some(problem(503, "store-unavailable")),
        Some(problem(409, "in-progress")),
        Some(paid("a", false)),
        Some(paid("a", true)),
        Some(problem(503, "store-unavailable")),
        Some(paid("a", true)),
    ];
    assert_eq!(found(&history(answers), &[payment("a", 1)], ONCE), []);
}

#[test]
fn a_second_effect_is_found_although_all_answers_are_the_same() {
    let told = history([Some(paid("a", false)), Some(paid("a", true))]);
    assert_eq!(found(&told, &[payment("a", 1), payment("b", 2)], ONCE), [What::TwoEffects(2)]);
    let late = [at(0, 2000, Some(paid("a", false))), at(3000, 3500, Some(paid("a", true)))];
    assert_eq!(found(&late, &[payment("a", 1), payment("b", 2)], OFTEN), [], "its lease may have been over");
    assert_eq!(found(&told, &[payment("a", 1), payment("b", 1)], OFTEN), [What::AttemptTwice]);
    assert_eq!(found(&told, &[payment("a", 2), payment("b", 1)], OFTEN), [], "its lease was over, and it went on");
}

#[test]
fn an_effect_of_which_nobody_heard_counts_too() {
    let effects = [payment("a", 1), payment("b", 2)];
    assert!(found(&[], &effects, ONCE).contains(&What::TwoEffects(2)));
}

#[test]
fn a_success_without_an_effect_is_found() {
    let told = history([Some(paid("a", false))]);
    assert_eq!(found(&told, &[], ONCE), [What::SuccessWithoutEffect]);
    assert_eq!(found(&told, &[payment("b", 1)], ONCE), [What::SuccessWithoutEffect]);
}

#[test]
fn answers_that_differ_in_a_byte_are_found() {
    let other = Answer { digest: 99, ..paid("a", true) };
    assert!(lie(ONCE, [paid("a", false), other.clone()]).contains(&What::AnswersDiffer));
    assert!(lie(OFTEN, [paid("a", true), other]).contains(&What::AnswersDiffer));
}

#[test]
fn a_second_run_is_found_whether_or_not_it_came_later() {
    assert!(lie(ONCE, [paid("a", false), paid("a", false)]).contains(&What::RanTwice));
    assert_eq!(lie(OFTEN, [paid("a", true), paid("a", false)]), [What::RanTwice]);
    let mut overlapping = history([Some(paid("a", false)), Some(paid("a", false))]);
    overlapping[1].began = Duration::ZERO;
    assert!(found(&overlapping, &[payment("a", 1)], ONCE).contains(&What::RanTwice));
    // An owner that lost its lease answers its own client.
    overlapping[0].answer = Some(paid("a", true));
    assert_eq!(found(&overlapping, &[payment("a", 1)], OFTEN), []);
}

#[test]
fn a_settled_answer_that_changes_or_vanishes_is_found() {
    let failed = Answer { status: 500, is_replay: true, ..problem(500, "handler-failed") };
    assert_eq!(lie(ONCE, [paid("a", true), failed]), [What::SettledAnswerChanged]);
    let unknown = Promise { may_be_unknown: true, ..ONCE };
    assert_eq!(lie(unknown, [paid("a", true), problem(504, "outcome-unknown")]), [What::SettledAnswerChanged]);
    assert_eq!(lie(ONCE, [paid("a", true), problem(409, "in-progress")]), [What::SettledAnswerVanished]);
    let cached = Promise { stale_lock: Duration::from_secs(2), ..ONCE };
    assert_eq!(lie(cached, [paid("a", true), problem(409, "in-progress")]), []);
    let late = [paid("a", true), paid("a", true), paid("a", true), problem(409, "in-progress")];
    assert_eq!(lie(cached, late), [What::SettledAnswerVanished]);
}

#[test]
fn an_unknown_outcome_is_found_where_none_may_be() {
    let answers = || [problem(504, "outcome-unknown"), problem(504, "outcome-unknown")];
    assert_eq!(lie(ONCE, answers()), [What::OutcomeUnknown]);
    assert_eq!(lie(Promise { may_be_unknown: true, ..ONCE }, answers()), []);
}

#[test]
fn an_answer_of_another_tenant_or_of_another_body_is_found() {
    let mut theirs = paid("a", true);
    theirs.payment = Some(Payment { key: Key { tenant: 2, key: 7 }, ..payment("a", 1) });
    assert_eq!(lie(ONCE, [theirs]), [What::AnotherKeysAnswer]);
    let mut other = paid("a", true);
    other.payment = Some(Payment { amount: 11, ..payment("a", 1) });
    assert_eq!(lie(ONCE, [other]), [What::AnotherBodysAnswer]);
}

#[test]
fn a_request_that_is_taken_for_another_one_is_found() {
    assert_eq!(lie(ONCE, [paid("a", false), problem(422, "mismatch")]), [What::FalseMismatch]);
    let mut altered = history([Some(paid("a", false)), Some(problem(422, "mismatch"))]);
    altered[1].amount = 11;
    assert_eq!(found(&altered, &[payment("a", 1)], ONCE), []);
}

#[test]
fn a_key_that_stays_stuck_is_found() {
    let stuck = || problem(409, "in-progress");
    assert_eq!(lie(ONCE, [stuck(), stuck()]), [What::NoAnswer]);
    let late = [stuck(), stuck(), stuck(), stuck(), stuck(), paid("a", false)];
    assert_eq!(lie(ONCE, late), [What::NoAnswer], "5.5 s are more than 5");
    assert_eq!(lie(ONCE, [problem(422, "mismatch")]), [What::NoAnswer], "no answer to whoever asked first");
}

#[test]
fn what_was_seen_is_counted() {
    let answers = [
        None,
        Some(paid("a", false)),
        Some(paid("a", true)),
        Some(problem(422, "mismatch")),
        Some(problem(409, "in-progress")),
        Some(problem(504, "outcome-unknown")),
    ];
    let counted = seen(&history(answers), &[payment("a", 1), payment("b", 2)], &Known::default());
    let expected = Seen {
        operations: 6,
        successes: 1,
        replays: 1,
        mismatches: 1,
        in_progress: 1,
        takeovers: 2,
        unknown: 1,
        stalled: 0,
    };
    assert_eq!(counted, expected);
}

/// One request that began and ended at these milliseconds.
fn at(began: u64, ended: u64, answer: Option<Answer>) -> Operation {
    let (began, ended) = (Duration::from_millis(began), Duration::from_millis(ended));
    Operation { key: KEY, amount: 10, began, ended, answer }
}

fn altered(operation: Operation) -> Operation {
    Operation { amount: 11, ..operation }
}

#[test]
fn answers_that_explain_each_other_have_an_order() {
    let busy = || Some(problem(409, "in-progress"));
    let away = || Some(problem(503, "store-unavailable"));
    let mismatch = || Some(problem(422, "mismatch"));
    let unknown = || Some(problem(504, "outcome-unknown"));
    let all = [
        // All at once, in any order.
        vec![at(0, 90, busy()), at(0, 90, Some(paid("a", true))), at(0, 90, Some(paid("a", false)))],
        // The request without an answer did run, and late.
        vec![at(0, 10, None), at(20, 30, away()), at(40, 50, busy()), at(60, 70, Some(paid("a", true)))],
        // A run failed, and another one followed.
        vec![at(0, 10, None), at(20, 30, busy()), at(40, 90, Some(paid("a", false))), at(50, 60, busy())],
        // The altered one came first, and was lost.
        vec![altered(at(0, 10, None)), at(20, 30, mismatch()), at(40, 50, Some(paid("a", false)))],
        vec![at(0, 50, Some(paid("a", false))), altered(at(10, 20, mismatch())), altered(at(60, 70, mismatch()))],
        vec![at(0, 10, None), at(20, 30, busy()), at(40, 50, unknown()), at(60, 70, unknown())],
        // The first request meets its own run, whose answer it never got.
        vec![at(0, 10, busy()), at(20, 30, Some(paid("a", false)))],
        vec![at(10, 90, unknown()), at(20, 30, busy()), at(40, 50, unknown())],
        vec![at(0, 10, Some(paid("a", false))), at(20, 30, Some(problem(410, "body-not-retained")))],
    ];
    for history in all {
        assert!(has_order(&history, Promise { may_be_unknown: true, ..ONCE }), "{history:#?}");
    }
}

#[test]
fn answers_that_nothing_explains_are_found() {
    let busy = || Some(problem(409, "in-progress"));
    let mismatch = || Some(problem(422, "mismatch"));
    let all = [
        // Replayed before it ran.
        vec![at(0, 10, Some(paid("a", true))), at(20, 30, Some(paid("a", false)))],
        // A mismatch before any client has sent another body.
        vec![at(0, 10, None), at(20, 30, mismatch())],
        vec![at(0, 10, mismatch()), altered(at(20, 30, None))],
        // In progress after it was settled.
        vec![at(0, 10, Some(paid("a", false))), at(20, 30, busy())],
        vec![at(0, 10, None), at(20, 30, Some(paid("a", true))), at(40, 50, busy())],
        // Two runs, the second one after the first one was settled.
        vec![at(0, 10, Some(paid("a", false))), at(20, 30, Some(paid("a", false)))],
        // Settled after its outcome was unknown.
        vec![at(0, 10, None), at(20, 30, Some(problem(504, "outcome-unknown"))), at(40, 50, Some(paid("a", true)))],
        // Both bodies at once.
        vec![at(0, 90, Some(paid("a", false))), altered(at(0, 90, Some(paid("b", false))))],
    ];
    for history in all {
        assert!(!has_order(&history, Promise { may_be_unknown: true, ..ONCE }), "{history:#?}");
    }
}

#[test]
fn a_run_that_lost_its_lease_is_in_order_where_it_may_be() {
    let overlapping =
        [at(0, 50, Some(paid("a", false))), at(10, 40, Some(paid("b", false))), at(60, 70, Some(paid("b", true)))];
    assert!(has_order(&overlapping, OFTEN));
    assert!(!has_order(&overlapping, ONCE));
    let later =
        [at(0, 10, Some(paid("a", false))), at(20, 30, Some(paid("b", true))), at(40, 50, Some(paid("c", false)))];
    assert!(!has_order(&later, OFTEN), "it runs again after it was settled");
}

#[test]
fn a_lock_that_is_left_over_is_in_order_for_its_time() {
    let left = [at(0, 10, Some(paid("a", false))), at(500, 510, Some(problem(409, "in-progress")))];
    assert!(!has_order(&left, ONCE));
    assert!(has_order(&left, Promise { stale_lock: Duration::from_secs(1), ..ONCE }));
}

#[test]
fn a_settlement_behind_its_answer_is_in_order_for_its_time_and_only_after_an_answer_that_was_late() {
    let behind = Some(Behind { patience: Duration::from_secs(5), delay: Duration::from_secs(2) });
    let behind = Promise { settles_behind: behind, ..ONCE };
    let vanished = [What::SettledAnswerVanished, What::NoOrder];
    // End of the run, start of the repeat, answer to the repeat, and broken rules.
    let all = [
        (5000, 6500, problem(409, "in-progress"), &[][..]),
        (5000, 7500, problem(409, "in-progress"), &vanished),
        (4900, 6500, problem(409, "in-progress"), &vanished),
        (5000, 6500, Answer { digest: 99, ..paid("aa", true) }, &[What::AnswersDiffer, What::NoOrder]),
    ];
    for (ran, repeated, answer, wrong) in all {
        let told = [at(0, ran, Some(paid("aa", false))), at(repeated, repeated + 10, Some(answer))];
        let effects = [payment("aa", 1)];
        let found = |promise| -> Vec<What> {
            check(&told, &effects, &known_to_run(), promise, Duration::ZERO)
                .into_iter()
                .map(|violation| violation.what)
                .collect()
        };
        assert_eq!(found(behind), wrong, "{ran} {repeated}");
        assert!(found(ONCE).contains(&What::NoOrder), "{ran} {repeated}");
    }
    // Once it has been replayed it is settled.
    let replayed =
        [(0, 5000, paid("a", false)), (5100, 5200, paid("a", true)), (5300, 5400, problem(409, "in-progress"))];
    let replayed = replayed.map(|(began, ended, answer)| at(began, ended, Some(answer)));
    assert_eq!(found(&replayed, &[payment("a", 1)], behind), [What::SettledAnswerVanished]);
    assert!(!has_order(&replayed, behind));
}

#[test]
fn a_settlement_behind_its_answer_may_come_too_late_for_its_lease_and_no_other_may() {
    let behind = Some(Behind { patience: Duration::from_secs(5), delay: Duration::from_secs(2) });
    let behind = Promise { settles_behind: behind, may_be_unknown: true, ..ONCE };
    let unknown = || Some(problem(504, "outcome-unknown"));
    let after = |ran, answers: [Option<Answer>; 2]| {
        let [next, last] = answers.map(|answer| at(60_000, 60_010, answer));
        [at(0, ran, Some(paid("a", false))), next, Operation { began: last.began * 2, ended: last.ended * 2, ..last }]
    };
    assert!(has_order(&after(5000, [unknown(), unknown()]), behind));
    assert!(!has_order(&after(4900, [unknown(), unknown()]), behind), "it was settled before it was answered");
    assert!(!has_order(&after(5000, [unknown(), Some(paid("a", true))]), behind), "unknown is for good");
    assert!(!has_order(&after(5000, [Some(paid("a", true)), unknown()]), behind), "it was settled");
}

#[test]
fn an_effect_of_a_later_attempt_after_a_success_in_time_is_found_where_runs_may_repeat() {
    let told = [at(0, 1900, Some(paid("a", false))), at(5000, 5500, Some(paid("b", false)))];
    let effects = [payment("a", 1), payment("b", 2)];
    let broken = |known: &Known| -> Vec<What> {
        check(&told, &effects, known, OFTEN, Duration::ZERO).into_iter().map(|violation| violation.what).collect()
    };
    assert!(broken(&known_to_run()).contains(&What::EffectAfterSuccess));
    let jump = (Duration::from_millis(1500), Duration::from_millis(2500));
    let known = Known { jumps: vec![jump], ..known_to_run() };
    assert!(!broken(&known).contains(&What::EffectAfterSuccess), "its lease was over too early");
    let earlier = [payment("a", 1), payment("b", 1)];
    assert_eq!(found(&told[..1], &earlier[..1], OFTEN), []);
}

#[test]
fn an_unknown_outcome_of_what_never_ran_is_found_unless_something_was_lost() {
    let unknown = Promise { may_be_unknown: true, live_within: Duration::from_secs(60), ..ONCE };
    let told = [at(10_000, 12_000, None), at(30_000, 30_500, Some(problem(504, "outcome-unknown")))];
    let broken = |known: &Known| -> Vec<What> {
        check(&told, &[], known, unknown, Duration::ZERO).into_iter().map(|violation| violation.what).collect()
    };
    let lost = |from, until| Known {
        losses: vec![(Duration::from_millis(from), Duration::from_millis(until))],
        ..Known::default()
    };
    assert_eq!(broken(&Known::default()), [What::UnknownAndNeverRun]);
    assert_eq!(broken(&known_to_run()), [], "it ran, and died");
    assert_eq!(broken(&lost(9000, 9900)), [What::UnknownAndNeverRun], "nobody had asked yet");
    assert_eq!(broken(&lost(9000, 10_000)), [], "its owner may have died");
    assert_eq!(broken(&lost(14_000, 15_000)), [], "it was let go of until then");
    assert_eq!(broken(&lost(14_100, 29_000)), [What::UnknownAndNeverRun], "it was free by then");
    assert_eq!(broken(&lost(31_000, 32_000)), [What::UnknownAndNeverRun], "that came later");
}

#[test]
fn keys_that_were_asked_for_first_in_a_stall_are_counted() {
    let known = Known { stalls: vec![(Duration::from_millis(900), Duration::from_millis(1900))], ..Known::default() };
    let other = Operation { key: Key { tenant: 1, key: 8 }, ..at(1000, 1500, None) };
    let first = at(500, 600, None);
    assert_eq!(seen(&[at(1000, 1500, None), first, other], &[], &known).stalled, 1);
}

#[test]
fn a_settlement_behind_its_answer_may_wait_for_the_end_of_a_stall() {
    let behind = Some(Behind { patience: Duration::from_secs(5), delay: Duration::from_secs(2) });
    let behind = Promise { settles_behind: behind, live_within: Duration::from_secs(10), ..ONCE };
    let told = [
        at(0, 6000, Some(paid("a", false))),
        at(61_000, 61_010, Some(problem(409, "in-progress"))),
        at(62_500, 62_510, Some(paid("a", true))),
    ];
    let until =
        |seconds| Known { stalls: vec![(Duration::from_secs(1), Duration::from_secs(seconds))], ..known_to_run() };
    let broken = |known: &Known| check(&told, &[payment("a", 1)], known, behind, Duration::ZERO);
    assert_eq!(broken(&until(60)), []);
    assert_eq!(broken(&until(58)).len(), 2, "it had time enough since the stall");
}

#[test]
fn thousands_of_answers_for_one_key_are_put_in_order() {
    let storm = (0..10_000).map(|number| match number {
        0..3000 if number % 3 == 0 => at(number, number + 40, None),
        0..4000 => at(number, number + 60, Some(problem(409, "in-progress"))),
        4000 => at(number, number + 500, Some(paid("a", false))),
        _ => at(number, number + 700, Some(paid("a", true))),
    });
    let mut storm: Vec<_> = storm.collect();
    assert!(has_order(&storm, ONCE));
    storm.push(at(20_000, 20_010, Some(problem(409, "in-progress"))));
    assert!(!has_order(&storm, ONCE));
}
