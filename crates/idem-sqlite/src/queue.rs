//! Sends questions to a task, which is restarted after it has ended.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use idem_core::{StoreError, StoreErrorKind};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// How many questions may wait in a queue. Further callers wait for room in their own futures, and leave when these are dropped.
const ROOM: usize = 1024;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

type Serve<Q> = Arc<dyn Fn(mpsc::Receiver<Q>) -> Task + Send + Sync>;

/// A handle to a task that answers questions. Clones share the task, which ends when all of them are dropped.
pub(crate) struct Queue<Q>(Arc<Shared<Q>>);

struct Shared<Q> {
    /// Closed when the task has ended: it panicked, or its runtime is gone.
    sender: Mutex<mpsc::Sender<Q>>,
    serve: Serve<Q>,
}

impl<Q: Send + 'static> Queue<Q> {
    /// Starts a task that answers questions by `serve`. Needs a tokio runtime.
    pub(crate) fn start<S: Future<Output = ()> + Send + 'static>(
        serve: impl Fn(mpsc::Receiver<Q>) -> S + Send + Sync + 'static,
    ) -> Self {
        Self::served_by(Arc::new(move |questions| -> Task { Box::pin(serve(questions)) }))
    }

    /// A handle to another task of the same kind, on the current runtime.
    pub(crate) fn another(&self) -> Self {
        Self::served_by(Arc::clone(&self.0.serve))
    }

    fn served_by(serve: Serve<Q>) -> Self {
        let (sender, questions) = mpsc::channel(ROOM);
        tokio::spawn(serve(questions));
        Self(Arc::new(Shared { sender: Mutex::new(sender), serve }))
    }

    /// Asks, and awaits the answer.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unavailable`] when the task ended before it answered. It may have done what it was asked for.
    pub(crate) async fn ask<A>(&self, question: impl FnOnce(oneshot::Sender<A>) -> Q) -> Result<A, StoreError> {
        let (answer, answered) = oneshot::channel();
        // If the task ends before it takes the question, the question comes back.
        if let Err(mpsc::error::SendError(question)) = self.sender()?.send(question(answer)).await {
            let sender = self.sender()?;
            sender.send(question).await.map_err(|_| ended("the task of the SQLite store ended as soon as it began"))?;
        }
        answered
            .await
            .map_err(|_| ended("the task of the SQLite store ended before it answered; ask again").indeterminate())
    }

    /// The channel to the task. If the task has ended, starts another one on the caller's runtime.
    fn sender(&self) -> Result<mpsc::Sender<Q>, StoreError> {
        // Every change is one assignment, so a panic leaves the channel whole.
        let mut sender = self.0.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_closed() {
            let runtime = Handle::try_current().map_err(|error| {
                ended("the runtime of the SQLite store has ended; ask inside another tokio runtime").with_source(error)
            })?;
            tracing::warn!("a task of the SQLite store has ended, and is started again");
            let (next, questions) = mpsc::channel(ROOM);
            runtime.spawn((self.0.serve)(questions));
            *sender = next;
        }
        Ok(sender.clone())
    }
}

fn ended(message: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

impl<Q> Clone for Queue<Q> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Q> fmt::Debug for Queue<Q> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Queue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    type Numbers = Queue<(u32, oneshot::Sender<u32>)>;

    /// Answers with the number; panics at 0, and keeps 1 waiting for ever.
    fn numbers() -> (Numbers, Arc<Seen>) {
        let seen = Arc::new(Seen::default());
        let sees = Arc::clone(&seen);
        let queue = Queue::start(move |mut questions: mpsc::Receiver<(u32, oneshot::Sender<u32>)>| {
            sees.starts.fetch_add(1, Ordering::SeqCst);
            let sees = Arc::clone(&sees);
            async move {
                while let Some((number, mut answer)) = questions.recv().await {
                    sees.questions.fetch_add(1, Ordering::SeqCst);
                    match number {
                        0 => panic!("as it was asked to"),
                        1 => answer.closed().await,
                        number => drop(answer.send(number)),
                    }
                }
            }
        });
        (queue, seen)
    }

    #[derive(Default)]
    struct Seen {
        starts: AtomicU32,
        questions: AtomicU32,
    }

    async fn ask(queue: &Numbers, number: u32) -> Result<u32, StoreError> {
        queue.ask(|answer| (number, answer)).await
    }

    #[tokio::test]
    async fn a_task_that_panics_is_an_error_at_once_and_is_started_again() {
        let (queue, seen) = numbers();
        for starts in 1..=3 {
            assert_eq!(ask(&queue, 7).await.unwrap(), 7);
            assert_eq!(seen.starts.load(Ordering::SeqCst), starts);
            let (panics, waits) = tokio::join!(ask(&queue, 0), ask(&queue, 8));
            for error in [panics.unwrap_err(), waits.unwrap_err()] {
                assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                assert!(error.is_indeterminate() && error.to_string().contains("ask again"), "{error:?}");
            }
        }
    }

    #[test]
    fn a_task_whose_runtime_ends_is_an_error_at_once_and_is_started_again_on_another() {
        let (first, second) = [(); 2].map(|()| tokio::runtime::Runtime::new().unwrap()).into();
        let (queue, seen) = first.block_on(async { numbers() });
        let waiting = queue.clone();
        let waits = second.spawn(async move { ask(&waiting, 1).await });
        while seen.questions.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        first.shutdown_background();
        assert!(second.block_on(waits).unwrap().unwrap_err().is_indeterminate());
        // The asker learns of the end a moment before the channel closes.
        while !queue.0.sender.lock().unwrap().is_closed() {
            std::thread::yield_now();
        }
        assert_eq!(second.block_on(ask(&queue, 7)).unwrap(), 7);
        assert_eq!(seen.starts.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn the_task_ends_when_nobody_is_left_to_ask() {
        let (queue, _) = numbers();
        assert_eq!(ask(&queue, 7).await.unwrap(), 7);
        let tasks = || Handle::current().metrics().num_alive_tasks();
        assert_eq!(tasks(), 1);
        drop(queue);
        while tasks() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
