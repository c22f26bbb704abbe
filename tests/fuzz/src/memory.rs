//! Whether what an input takes of memory is in proportion to its length.

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What may be taken whatever the input: runtimes, and what other threads of a test do meanwhile.
const ALWAYS_BYTES: usize = 1 << 20;

/// What an oracle may take for a byte of input: it keeps several copies, as texts and as trees whose nodes take most where their
/// texts are shortest, and vectors double.
pub(crate) const OF_ORACLES: usize = 2_048;

/// What the library may take for a byte of input. Long bodies have tighter bounds, in `tests/bodies.rs`.
pub(crate) const OF_THE_LIBRARY: usize = 16;

/// One input at a time, as there is one allocator.
static TURN: Mutex<()> = Mutex::new(());

/// What some work took of memory, in bytes.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Taken {
    /// What it still has, with what it returned.
    pub after: usize,
    /// The most that it had.
    pub peak: usize,
}

/// Runs `work`, and says what it took.
pub fn taken<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let done = work();
    let since = |usage: usize| usage.saturating_sub(before);
    (done, Taken { after: since(ALLOCATOR.current_usage()), peak: since(ALLOCATOR.peak_usage()) })
}

/// Runs `work` on an input of this length, of which each byte may take so many of memory.
pub(crate) fn in_proportion<T>(length: usize, per_byte: usize, work: impl FnOnce() -> T) -> T {
    let (done, Taken { peak: taken, .. }) = taken(work);
    let allowed = ALWAYS_BYTES + length * per_byte;
    assert!(taken <= allowed, "an input of {length} bytes took {taken} bytes of memory, over {allowed}");
    done
}
