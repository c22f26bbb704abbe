//! Checks that memory use is proportional to the length of the input.

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The memory allowed for any input: runtimes, and other threads of a test.
const ALWAYS_BYTES: usize = 1 << 20;

/// The memory allowed to an oracle per byte of input. It keeps several copies, as texts and as trees whose nodes cost most if
/// their texts are short, and vectors double.
pub(crate) const OF_ORACLES: usize = 2_048;

/// The memory allowed to the library per byte of input. Long bodies have tighter bounds, in `tests/bodies.rs`.
pub(crate) const OF_THE_LIBRARY: usize = 16;

/// Serializes measurements, because there is one allocator.
static TURN: Mutex<()> = Mutex::new(());

/// The memory that some work used, in bytes.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Taken {
    /// The memory still in use, including the result.
    pub after: usize,
    /// The peak.
    pub peak: usize,
}

/// Runs `work` and measures its memory.
pub fn taken<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let done = work();
    let since = |usage: usize| usage.saturating_sub(before);
    (done, Taken { after: since(ALLOCATOR.current_usage()), peak: since(ALLOCATOR.peak_usage()) })
}

/// Runs `work` on an input of this length, with an allowance of `per_byte` bytes of memory per byte.
pub(crate) fn in_proportion<T>(length: usize, per_byte: usize, work: impl FnOnce() -> T) -> T {
    let (done, Taken { peak: taken, .. }) = taken(work);
    let allowed = ALWAYS_BYTES + length * per_byte;
    assert!(taken <= allowed, "an input of {length} bytes took {taken} bytes of memory, over {allowed}");
    done
}
