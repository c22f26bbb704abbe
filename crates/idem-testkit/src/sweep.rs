//! Drops a future at every one of its awaits.

use std::pin::pin;
use std::task::Poll;

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepReport {
    /// How often the future waited before it completed; it was dropped once at each of these, and once unpolled.
    pub awaits: usize,
}

/// A future that waits this often never completes.
const MOST_AWAITS: usize = 1_000;

/// Drops a future at every await. Each time it makes the future again, lets it come one await further, and drops it there,
/// until the future completes.
///
/// The first future is dropped without being polled. Between two polls, the future waits for its own wake-up, so its progress
/// is that of normal use. After every drop, and after the completion, `after_each` is called with the number of awaits that
/// the future reached. There the caller proves that nothing was left half done.
///
/// # Panics
/// When the future does not complete within 1,000 awaits.
pub async fn drop_at_every_await<Fut, Check>(
    mut make: impl FnMut() -> Fut,
    mut after_each: impl FnMut(usize) -> Check,
) -> SweepReport
where
    Fut: Future,
    Check: Future<Output = ()>,
{
    for awaits in 0..MOST_AWAITS {
        let reached = poll_until(awaits, make()).await.map(|(waited, _)| waited);
        after_each(awaits.min(reached.unwrap_or(awaits))).await;
        if let Some(awaits) = reached {
            return SweepReport { awaits };
        }
    }
    panic!("the future did not complete within {MOST_AWAITS} awaits");
}

/// Polls a future until it has waited `awaits` times, and drops it there; with 0, without polling it. Returns its output if
/// it completes before.
///
/// It serves sweeps of a single verb, whose record other verbs prepare: call it with 0, 1, 2, … until there is an output.
pub async fn drop_at_await<Fut: Future>(awaits: usize, future: Fut) -> Option<Fut::Output> {
    poll_until(awaits, future).await.map(|(_, output)| output)
}

/// Like [`drop_at_await`], and returns how often the future waited.
async fn poll_until<Fut: Future>(awaits: usize, future: Fut) -> Option<(usize, Fut::Output)> {
    let mut future = pin!(future);
    let mut waited = 0;
    if awaits == 0 {
        return None;
    }
    std::future::poll_fn(move |context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some((waited, output))),
        Poll::Pending => {
            waited += 1;
            if waited == awaits { Poll::Ready(None) } else { Poll::Pending }
        }
    })
    .await
}
