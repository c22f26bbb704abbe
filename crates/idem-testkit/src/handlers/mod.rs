//! Trials of handlers: whether an operation behind the layer is safe to repeat.
//!
//! A [`Trial`] starts the service on separate runtimes, which stand for processes. It sends one request in several ways, and counts
//! the effects:
//!
//! - twice to one process, once more to another one, and eight times at once;
//! - from a client that disconnects before it has its answer;
//! - to a process that crashes before the handler runs, between the effect and its record, and after the record.
//!
//! A crash ends a runtime: its tasks go no further, and what they hold is dropped, destructors included. Threads that the service
//! started (`spawn_blocking` too) go on. An effect that a handler leaves to a task is found only if it comes after the answer.

mod broken;
mod process;
mod scenarios;
mod trial;

pub use broken::Broken;
pub use trial::Trial;

/// Tries a handler; see [`Trial::check`].
///
/// # Panics
/// With a sentence that says which promise the handler breaks.
pub async fn assert_idempotent(trial: &Trial) {
    if let Err(broken) = trial.check().await {
        panic!("{broken}");
    }
}
