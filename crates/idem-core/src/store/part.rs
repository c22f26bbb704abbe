//! The size of the parts in which records are read.

use std::num::NonZeroU32;

use super::{StoreError, StoreErrorKind};

/// How many records to read or remove at a time: fewer after a timeout, and more again after successes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSize(NonZeroU32);

impl PartSize {
    /// Few enough that a disk finds them within a store's timeout, although the rows lie all over the table.
    const FIRST: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

    /// Parts below this size hardly answer faster, so a timeout has another reason until even this size times out.
    const SMALL: NonZeroU32 = NonZeroU32::new(50).expect("not zero");

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

    /// Halves the size after a timeout, so that a slow disk only makes a scan slower. It goes below 50 only if 50 time out, too.
    ///
    /// # Errors
    /// The error, if it is no timeout, or the size is 1.
    pub fn shrink(&mut self, error: StoreError) -> Result<(), StoreError> {
        match NonZeroU32::new(self.0.get() / 2) {
            Some(half) if error.kind() == StoreErrorKind::Timeout => {
                self.0 = if self.0 > Self::SMALL { half.max(Self::SMALL) } else { half };
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Doubles the size, up to 1,000. A long scan calls it after several parts without an error.
    pub fn grow(&mut self) {
        self.grow_to(Self::FIRST);
    }

    /// Doubles the size, up to `most`. Larger parts cost the server less for each record, and hold more records at a time.
    pub fn grow_to(&mut self, most: NonZeroU32) {
        self.0 = self.0.saturating_add(self.0.get()).min(most);
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
        assert_eq!(sizes, [500, 250, 125, 62, 50, 25, 12, 6, 3, 1]);
    }
    #[test]
    fn the_size_grows_back_to_the_first() {
        let mut part = PartSize::new();
        while part.shrink(StoreError::new(StoreErrorKind::Timeout, "away")).is_ok() {}
        let sizes = [(); 11].map(|()| {
            part.grow();
            part.get().get()
        });
        assert_eq!(sizes, [2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 1_000]);
        let most = NonZeroU32::new(3_000).unwrap();
        assert_eq!(
            [(); 3].map(|()| {
                part.grow_to(most);
                part.get().get()
            }),
            [2_000, 3_000, 3_000]
        );
    }
}
