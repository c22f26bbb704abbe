//! An operation in the task of whoever awaits it, and beyond.

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tracing::{Instrument as _, Span};

use super::Idempotency;
use super::contract::Conclusion;
use super::execute::{self, Asked, ExecuteError, Granted, Handler, Outcome};
use crate::planted;

/// An operation that is driven by whoever awaits it. Dropped before its end, it goes on in a task of its own.
pub(super) struct Attended<T, P>
where
    T: Send + 'static,
    P: FnOnce() -> Conclusion<T> + Send + 'static,
{
    engine: Idempotency,
    /// Of whoever asked: what the operation logs belongs to the request.
    span: Span,
    stage: Stage<T, P>,
}

/// How far it is. What is done, and large, is gone by then.
enum Stage<T, P> {
    Asking(Pin<Box<dyn Future<Output = Asked<T>> + Send>>, Handler<T>, P),
    Granted(Granted<T>, Handler<T>, P),
    Running(Pin<Box<dyn Future<Output = ()> + Send>>),
    Over,
}

impl<T, P> Attended<T, P>
where
    T: Send + 'static,
    P: FnOnce() -> Conclusion<T> + Send + 'static,
{
    pub(super) fn new(
        engine: Idempotency,
        asking: impl Future<Output = Asked<T>> + Send + 'static,
        run: Handler<T>,
        on_panic: P,
    ) -> Self {
        let engine = planted!(engine, "no-task-of-its-own" => Idempotency { attended: true, ..engine });
        Self { engine, span: Span::current(), stage: Stage::Asking(Box::pin(asking), run, on_panic) }
    }

    /// Goes on in a task of its own.
    fn go_on(&self, driven: impl Future<Output = ()> + Send + 'static) {
        let tasks = &self.engine.shared.tasks;
        let driven = driven.instrument(self.span.clone());
        match &self.engine.runtime {
            Some(runtime) => tasks.spawn_on(driven, runtime),
            None => tasks.spawn(driven),
        };
    }

    /// Drives it to its end or, if it is to have a task of its own, to where it would wait or run: a store that answers at
    /// once, as one in memory does, makes a task needless for whoever does not run.
    ///
    /// `Some` is an answer that it has without running; any other one is given to whoever waits for it.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Outcome<T>>> {
        // Its timers and its renewals belong to the runtime on which it may go on.
        let _entered = self.engine.runtime.as_ref().map(Handle::enter);
        let stage = mem::replace(&mut self.stage, Stage::Over);
        // As in a task, a panic of an observer ends the operation, and not whoever asked for it.
        match catch_unwind(AssertUnwindSafe(|| stage.poll(&self.engine, context))) {
            Ok(Ok(answer)) => Poll::Ready(answer),
            Ok(Err(stage)) => {
                self.stage = stage;
                if self.engine.attended { Poll::Pending } else { Poll::Ready(None) }
            }
            Err(_) => Poll::Ready(Some(Err(ExecuteError::Interrupted))),
        }
    }
}

impl<T, P> Stage<T, P>
where
    T: Send + 'static,
    P: FnOnce() -> Conclusion<T> + Send + 'static,
{
    /// Its end, or how far it came.
    fn poll(self, engine: &Idempotency, context: &mut Context<'_>) -> Result<Option<Outcome<T>>, Self> {
        let mut running = match self {
            Self::Asking(mut asking, run, on_panic) => {
                let Poll::Ready(asked) = asking.as_mut().poll(context) else {
                    return Err(Self::Asking(asking, run, on_panic));
                };
                match asked.granted(&engine.shared) {
                    Ok(granted) if engine.attended => Box::pin(execute::run_granted(granted, run, on_panic)),
                    Ok(granted) => return Err(Self::Granted(granted, run, on_panic)),
                    Err((_, answer)) => return Ok(Some(answer)),
                }
            }
            Self::Running(running) => running,
            beyond @ (Self::Granted(..) | Self::Over) => return Err(beyond),
        };
        if running.as_mut().poll(context).is_ready() { Ok(None) } else { Err(Self::Running(running)) }
    }
}

impl<T, P> Drop for Attended<T, P>
where
    T: Send + 'static,
    P: FnOnce() -> Conclusion<T> + Send + 'static,
{
    fn drop(&mut self) {
        planted!("no-task-of-its-own" => return);
        match mem::replace(&mut self.stage, Stage::Over) {
            Stage::Over => {}
            Stage::Asking(asking, run, on_panic) => {
                self.go_on(execute::drive(Arc::clone(&self.engine.shared), asking, run, on_panic));
            }
            Stage::Granted(granted, run, on_panic) => self.go_on(execute::run_granted(granted, run, on_panic)),
            Stage::Running(running) => self.go_on(running),
        }
    }
}
