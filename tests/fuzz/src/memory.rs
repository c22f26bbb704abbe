//! Whether what an input takes of memory is in proportion to its length.

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What may be taken whatever the input: runtimes, and what other threads of a test do meanwhile.
const ALWAYS_BYTES: usize = 1 << 20;

/// What may be taken for a byte of input: the oracles keep several copies, as texts and as trees whose nodes take most where
/// their texts are shortest, and vectors double.
const PER_BYTE: usize = 2_048;

/// One input at a time, as there is one allocator.
static TURN: Mutex<()> = Mutex::new(());

/// Runs `check` on an input of this length.
pub(crate) fn in_proportion(length: usize, check: impl FnOnce()) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    check();
    let taken = ALLOCATOR.peak_usage().saturating_sub(before);
    let allowed = ALWAYS_BYTES + length * PER_BYTE;
    assert!(taken <= allowed, "an input of {length} bytes took {taken} bytes of memory, over {allowed}");
}
