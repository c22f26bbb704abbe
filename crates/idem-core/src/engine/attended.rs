//! A run in the task of its caller, and beyond.

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tracing::Span;

use super::Idempotency;

/// A run that its caller drives by awaiting this. If it is dropped before the end, the rest goes on in a new task.
pub(super) struct Attended {
    engine: Idempotency,
    /// Of the caller. The caller enters it itself; a new task does not.
    span: Span,
    /// `None` after its end.
    run: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Attended {
    pub(super) fn new(engine: Idempotency, run: impl Future<Output = ()> + Send + 'static, span: Span) -> Self {
        Self { engine, span, run: Some(Box::pin(run)) }
    }
}

impl Future for Attended {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(mut run) = this.run.take() else { return Poll::Ready(()) };
        // Its timers and its renewals belong to the runtime on which it may go on.
        let _entered = this.engine.runtime.as_ref().map(Handle::enter);
        match catch_unwind(AssertUnwindSafe(|| run.as_mut().poll(context))) {
            Ok(Poll::Pending) => {
                this.run = Some(run);
                Poll::Pending
            }
            // As in a task, a panic of an observer ends the operation, and not its caller.
            Ok(Poll::Ready(())) | Err(_) => Poll::Ready(()),
        }
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            let span = mem::replace(&mut self.span, Span::none());
            self.engine.spawn(run, span);
        }
    }
}
