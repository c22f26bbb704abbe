//! The size of the parts in which records are read.

use std::num::NonZeroU32;

use super::{StoreError, StoreErrorKind};

/// How many records to read or remove at a time: smaller after a timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSize(NonZeroU32);

impl PartSize {
    /// Few enough that a disk finds them within a store's timeout, although the rows lie all over the table.
    const FIRST: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

    /// 1,000 records.
    #[must_use]
    pub const fn new() -> Self {
        Self(Self::FIRST)
    }

    /// This number of records.
    #[must_use]
    pub const fn of(records: NonZeroU32) -> Self {
        Self(records)
    }

    /// The number of records.
    #[must_use]
    pub const fn get(self) -> NonZeroU32 {
        self.0
    }

    /// The number of records, but at most `limit`; `None` if that is zero.
    #[must_use]
    pub fn up_to(self, limit: u64) -> Option<NonZeroU32> {
        NonZeroU32::new(u32::try_from(limit).unwrap_or(u32::MAX).min(self.0.get()))
    }

    /// Halves the size after a timeout, so that a slow disk only makes a scan slower.
    ///
    /// # Errors
    /// The error, if it is no timeout, or the size is 1.
    pub fn shrink(&mut self, error: StoreError) -> Result<(), StoreError> {
        match NonZeroU32::new(self.0.get() / 2) {
            Some(half) if error.kind() == StoreErrorKind::Timeout => {
                self.0 = half;
                Ok(())
            }
            _ => Err(error),
        }
    }
}

impl Default for PartSize {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_halves_the_size_and_other_errors_end_the_scan() {
        let error = |kind| StoreError::new(kind, "away");
        let mut part = PartSize::new();
        assert_eq!((part.up_to(7).map(NonZeroU32::get), part.up_to(0)), (Some(7), None));
        assert!(part.shrink(error(StoreErrorKind::Unavailable)).is_err());
        let mut sizes = Vec::new();
        while part.shrink(error(StoreErrorKind::Timeout)).is_ok() {
            sizes.push(part.get().get());
        }
        assert_eq!(sizes, [500, 250, 125, 62, 31, 15, 7, 3, 1]);
    }
}
