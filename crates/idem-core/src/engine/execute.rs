//! An operation from its request to its answer: acquire → (answer | run) → settle → reply.
//!
//! [`ask`](super::ask) acquires, and [`Granted::carry_out`] does what follows. The store's answer to the first poll
//! decides what drives them:
//! - It does not run: the caller, to the end.
//! - It runs, and the engine has an [attended](super::attended) runtime: the caller, or a task if the caller goes away.
//! - It runs, and the engine has no such runtime: a task, from the run on.
//! - No answer yet: a task, from the acquire on.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};

use tokio::runtime::Handle;
use tracing::{Instrument as _, Span};

use super::answer::{Answer, ExecuteError, ExecuteResult, Reply};
use super::ask::{Asked, Next, ask};
use super::attended::Attended;
use super::context::Context;
use super::contract::Conclusion;
use super::granted::{Granted, Handler};
use super::observer::Subject;
use super::{Idempotency, Operation};

/// The result of polling an acquire once.
enum AtOnce<T> {
    Answered(ExecuteResult<T>),
    Granted(Granted<T>),
    Asking,
    /// The store panicked.
    Panicked,
}

impl Idempotency {
    /// Runs `run` unless it ran before, and settles its conclusion before it answers.
    ///
    /// `run` returns a [`Conclusion`]: the response to store for repeats, and the value for this caller. If it panics,
    /// `on_panic` concludes in its place.
    ///
    /// # Errors
    /// [`ExecuteError`] when the store could not say whether it may run, or whether its end is committed.
    ///
    /// # Cancellation safety
    /// Dropping the returned future cancels neither the operation nor its settlement.
    pub fn execute<T, F, R, P>(
        &self,
        operation: Operation,
        run: F,
        on_panic: P,
    ) -> impl Future<Output = Result<Answer<T>, ExecuteError>> + Send + use<T, F, R, P>
    where
        T: Send + 'static,
        F: FnOnce(Context) -> R + Send + 'static,
        R: Future<Output = Conclusion<T>> + Send + 'static,
        P: FnOnce() -> Conclusion<T> + Send + 'static,
    {
        // Boxed at once, so that it takes no room in each of the futures that hand it down, even after its end.
        let run: Handler<T> = Box::new(move |context| Box::pin(run(context)));
        let engine = self.clone();
        async move {
            // Counted before the check, so that a shutdown that begins in between waits for it.
            let _counted = engine.shared.group.tasks.token();
            if engine.shared.group.tasks.is_closed() {
                return engine.shared.refuse(&operation.scope, ExecuteError::ShuttingDown);
            }
            let Some(permit) = engine.shared.permit() else {
                return engine.shared.refuse(&operation.scope, engine.shared.overloaded());
            };
            let request = engine.shared.acquire_request(&operation);
            // If a task drives the operation, it enters the caller's span.
            let callers = Span::current();
            let mut subject = Subject::of(&request);
            subject.downstream = operation.downstream.unwrap_or(subject.id);
            let (reply, replied) = Reply::new(Arc::clone(&engine.shared), subject);
            let wait = operation.wait.unwrap_or(engine.shared.settings.wait);
            let mut asking =
                Box::pin(ask(Arc::clone(&engine.shared), request, operation.by_other_algorithms, wait, reply, permit));
            match engine.poll_once(asking.as_mut()).await {
                AtOnce::Answered(answer) => return answer,
                AtOnce::Granted(granted) => {
                    // Done, and large.
                    drop(asking);
                    let carried_out = granted.carry_out(run, on_panic);
                    if engine.attended {
                        Attended::new(engine, carried_out, callers).await;
                    } else {
                        engine.spawn(carried_out, callers);
                    }
                }
                AtOnce::Asking => {
                    let driven = ask_and_carry_out(engine.clone(), asking, run, on_panic);
                    engine.spawn(driven, callers);
                }
                AtOnce::Panicked => return Err(ExecuteError::Interrupted),
            }
            replied.await.unwrap_or(Err(ExecuteError::Interrupted))
        }
    }

    /// Polls an acquire once, on the caller's thread. If the store answers at once, as the in-memory store does, a
    /// repeat needs no task: its caller cannot go away in between.
    async fn poll_once<T>(&self, mut asking: Pin<&mut impl Future<Output = Asked<T>>>) -> AtOnce<T> {
        poll_fn(|context: &mut task::Context<'_>| {
            // Its timers belong to the runtime on which it may go on.
            let _entered = self.runtime.as_ref().map(Handle::enter);
            let poll = || asking.as_mut().poll(context).map(|asked| asked.next(&self.shared));
            // As in a task, a panic of a store ends the operation and not its caller.
            Poll::Ready(match catch_unwind(AssertUnwindSafe(poll)) {
                Ok(Poll::Ready(Next::Run(granted))) => AtOnce::Granted(granted),
                Ok(Poll::Ready(Next::Answer(reply, outcome))) => AtOnce::Answered(reply.give(outcome)),
                Ok(Poll::Pending) => AtOnce::Asking,
                Err(_) => AtOnce::Panicked,
            })
        })
        .await
    }

    /// Spawns a task in the span of its caller.
    pub(super) fn spawn(&self, driven: impl Future<Output = ()> + Send + 'static, span: Span) {
        let driven = driven.instrument(span);
        match &self.runtime {
            Some(runtime) => self.shared.group.tasks.spawn_on(driven, runtime),
            None => self.shared.group.tasks.spawn(driven),
        };
    }
}

/// Drives an operation to its end, from an acquire that is under way.
async fn ask_and_carry_out<T>(
    engine: Idempotency,
    asking: impl Future<Output = Asked<T>>,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) {
    match asking.await.next(&engine.shared) {
        Next::Run(granted) => granted.carry_out(run, on_panic).await,
        Next::Answer(reply, outcome) => reply.send(outcome),
    }
}
