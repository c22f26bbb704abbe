//! The commands, one module each.

pub(crate) mod check;
pub(crate) mod list;
pub(crate) mod purge;
pub(crate) mod repairs;
pub(crate) mod resolve;
pub(crate) mod show;
pub(crate) mod stats;
pub(crate) mod sweep;

use std::num::NonZeroU32;

use idem_core::{StoreError, StoreErrorKind};

/// How many records a command reads or removes at a time.
pub(crate) struct Part(NonZeroU32);

impl Part {
    /// Few enough that a disk finds them within the store's timeout: the rows lie all over the table.
    const FIRST: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

    pub(crate) fn new() -> Self {
        Self(Self::FIRST)
    }

    pub(crate) fn size(&self) -> NonZeroU32 {
        self.0
    }

    /// The size, but at most `limit`; `None` if that is zero.
    pub(crate) fn up_to(&self, limit: u64) -> Option<NonZeroU32> {
        NonZeroU32::new(u32::try_from(limit).unwrap_or(u32::MAX).min(self.0.get()))
    }

    /// Halves the part after a timeout, so that a slow disk only makes the scan slower.
    ///
    /// # Errors
    /// The error, if it is another one, or a smaller part would not help.
    pub(crate) fn shrink(&mut self, error: StoreError) -> Result<(), StoreError> {
        match NonZeroU32::new(self.0.get() / 2) {
            Some(half) if error.kind() == StoreErrorKind::Timeout => {
                self.0 = half;
                Ok(())
            }
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_halves_the_part_and_other_errors_end_the_scan() {
        let error = |kind| StoreError::new(kind, "away");
        let mut part = Part::new();
        assert_eq!((part.up_to(7).map(NonZeroU32::get), part.up_to(0)), (Some(7), None));
        assert!(part.shrink(error(StoreErrorKind::Unavailable)).is_err());
        let mut sizes = Vec::new();
        while part.shrink(error(StoreErrorKind::Timeout)).is_ok() {
            sizes.push(part.size().get());
        }
        assert_eq!(sizes, [500, 250, 125, 62, 31, 15, 7, 3, 1]);
    }
}
