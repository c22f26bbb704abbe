//! Random sequences of verbs, checked against the [`Model`] and against the laws.

mod compare;
mod observer;
mod steps;

use std::collections::HashMap;
use std::fmt;

use idem_core::{Acquisition, Lease, OwnerToken, Record, RecordId, Timestamp};
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use crate::conformance::runtime;
use crate::fixture::{fresh_id, request};
use crate::model::{Answer, Model, Operation};
use crate::subject::Subject;
use compare::{align_answer, align_record};
use observer::{Observer, Sight};
use steps::{Grid, IDS, Step, Verb};

/// How many sequences are tried unless `IDEM_CASES` sets another number.
pub const DEFAULT_CASES: u32 = 2_000;

/// The number of cases that the environment variable `IDEM_CASES` asks for, or `default`.
#[must_use]
pub fn cases_from_env_or(default: u32) -> u32 {
    std::env::var("IDEM_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

/// Makes a `#[test]` of the state-machine check, for the store that the harness gives.
///
/// `state_machine!(harness)`, `state_machine!(test_name, harness)` or `state_machine!(test_name, harness, cases)`, with a
/// harness as for [`conformance!`](crate::conformance!). The environment variable `IDEM_CASES` sets the number of
/// sequences; without it there are `cases`, for stores that are slow, or
/// [`DEFAULT_CASES`](crate::state_machine::DEFAULT_CASES).
#[macro_export]
macro_rules! state_machine {
    ($harness:expr) => {
        $crate::state_machine!(the_store_follows_the_model, $harness);
    };
    ($name:ident, $harness:expr) => {
        $crate::state_machine!($name, $harness, $crate::state_machine::DEFAULT_CASES);
    };
    ($name:ident, $harness:expr, $cases:expr) => {
        #[cfg(test)]
        #[test]
        fn $name() {
            let checked = $crate::state_machine::check($harness, $crate::state_machine::cases_from_env_or($cases));
            if let ::std::result::Result::Err(failure) = checked {
                panic!("{failure}");
            }
        }
    };
}

/// A store's answer differed from the model's, or broke a law.
#[derive(Debug)]
pub struct Divergence {
    message: String,
}

impl fmt::Display for Divergence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Divergence {}

/// Runs `cases` random sequences of verbs on one subject and compares every answer, and the record after it, with the
/// model and with the laws.
///
/// Every sequence uses fresh records, so one store serves all of them; its time only moves forward. Do not call it inside an
/// asynchronous runtime, because it makes one.
///
/// # Errors
/// [`Divergence`] with the shortest sequence found that shows it.
pub fn check<H, S>(harness: H, cases: u32) -> Result<(), Divergence>
where
    H: FnOnce() -> S,
    S: Future<Output = Subject>,
{
    let runtime = runtime();
    let subject = runtime.block_on(harness());
    let grid = Grid::new(subject.precision);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 4_096, ..Config::default() };
    let result = TestRunner::new(config).run(&steps::sequence(), |steps| {
        let run = async { Run::start(&subject, grid).await.all(&steps).await };
        runtime.block_on(run).map_err(TestCaseError::fail)
    });
    // The subject may own connections whose end needs the runtime.
    runtime.block_on(async { drop(subject) });
    result.map_err(|error| Divergence { message: describe(error) })
}

fn describe(error: TestError<Vec<Step>>) -> String {
    match error {
        TestError::Abort(reason) => format!("the check gave up: {reason}"),
        TestError::Fail(reason, steps) => {
            let lines: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
            format!("{reason}\nafter these steps:\n{}", lines.join("\n"))
        }
    }
}

/// The state of one sequence.
struct Run<'a> {
    subject: &'a Subject,
    grid: Grid,
    model: Model,
    observer: Observer,
    ids: [RecordId; IDS],
    /// The last lease that each owner got on each record, which the owner uses.
    leases: HashMap<(RecordId, OwnerToken), Lease>,
    now: Timestamp,
}

impl<'a> Run<'a> {
    async fn start(subject: &'a Subject, grid: Grid) -> Self {
        Self {
            subject,
            grid,
            model: Model::default(),
            observer: Observer::new(subject.precision),
            ids: std::array::from_fn(|_| fresh_id()),
            leases: HashMap::new(),
            now: subject.now().await,
        }
    }

    async fn all(mut self, steps: &[Step]) -> Result<(), String> {
        for (at, step) in steps.iter().enumerate() {
            self.step(step).await.map_err(|reason| format!("step {at}, {step:?}: {reason}"))?;
        }
        for id in self.ids {
            let record = self.subject.peek(&id).await;
            self.observer.finish(id, self.now, record.as_ref())?;
            self.compare_peek(id, record)?;
        }
        Ok(())
    }

    async fn step(&mut self, step: &Step) -> Result<(), String> {
        let pause = self.grid.pause(step);
        self.subject.time.advance(pause);
        self.now = self.now.saturating_add(pause);
        if let Verb::Purge { limit } = step.verb {
            let purged = self.subject.purge(limit).await;
            return if purged <= limit { Ok(()) } else { Err(format!("purged {purged} of at most {limit}")) };
        }
        let operation = self.operation(step);
        let id = self.ids[step.id];
        let (answer, after) = self.perform(id, &operation).await?;
        if step.repeat {
            let (again, after_again) = self.perform(id, &operation).await?;
            let again = align_answer(again, &answer, self.subject.precision);
            let after_again = align_record(after_again, after.as_ref(), self.subject.precision);
            if again != answer || after_again != after {
                return Err(format!("law L8 is broken: repeated, it gave {again:?} and {after_again:?}"));
            }
        }
        Ok(())
    }

    /// Runs an operation on the store and on the model. The laws judge first, because they say what is wrong; then the model.
    /// Returns the store's answer and record.
    async fn perform(&mut self, id: RecordId, operation: &Operation) -> Result<(Answer, Option<Record>), String> {
        let answer = execute(self.subject, operation).await.map_err(|error| format!("the store failed: {error:?}"))?;
        let record = self.subject.peek(&id).await;
        self.observer.see(&Sight { id, now: self.now, operation, answer: &answer, after: record.as_ref() })?;
        let expected = self.model.apply(operation, self.now);
        let aligned = align_answer(answer.clone(), &expected, self.subject.precision);
        if aligned != expected {
            return Err(format!("the store answered {aligned:?}, the model {expected:?}"));
        }
        if let Answer::Acquire(idem_core::AcquireOutcome::Acquired(lease)) = &answer {
            self.leases.insert((id, lease.owner), lease.clone());
        }
        self.compare_peek(id, record.clone())?;
        Ok((answer, record))
    }

    fn compare_peek(&mut self, id: RecordId, record: Option<Record>) -> Result<(), String> {
        let Answer::Peek(expected) = self.model.apply(&Operation::Peek(id), self.now) else { unreachable!() };
        let aligned = align_record(record, expected.as_ref(), self.subject.precision);
        if aligned == expected { Ok(()) } else { Err(format!("the store holds {aligned:?}, the model {expected:?}")) }
    }

    fn operation(&self, step: &Step) -> Operation {
        let id = self.ids[step.id];
        let owner = steps::owner(step.owner);
        let never_given = || Lease {
            id,
            fingerprint: request().fingerprint,
            owner,
            attempt: 1,
            acquisition: Acquisition::Fresh,
            checkpoint: None,
        };
        let lease = self.leases.get(&(id, owner)).cloned().unwrap_or_else(never_given);
        steps::operation(&step.verb, lease, self.grid)
    }
}

async fn execute(subject: &Subject, operation: &Operation) -> Result<Answer, idem_core::StoreError> {
    let store = &subject.store;
    Ok(match operation {
        Operation::Acquire(request) => Answer::Acquire(store.acquire(request).await?),
        Operation::Renew(lease, term) => Answer::Owner(store.renew(lease, *term).await?),
        Operation::Checkpoint(lease, checkpoint) => Answer::Owner(store.checkpoint(lease, checkpoint).await?),
        Operation::Settle(lease, settlement, retention) => {
            Answer::Owner(store.settle(lease, settlement, *retention).await?)
        }
        Operation::Peek(id) => Answer::Peek(store.peek(id).await?),
    })
}
