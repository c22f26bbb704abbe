//! How many bytes of request bodies may be held at once, over all requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A shared budget of bytes. Clones share it.
#[derive(Debug, Clone)]
pub struct ByteBudget {
    total: usize,
    left: Arc<AtomicUsize>,
}

/// Bytes taken from a budget, given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: ByteBudget,
    bytes: usize,
}

impl ByteBudget {
    /// A budget of `bytes`.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { total: bytes, left: Arc::new(AtomicUsize::new(bytes)) }
    }

    /// All of it, taken or not.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// A reservation of nothing, to be grown.
    #[must_use]
    pub fn reserve_none(&self) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
    }
}

impl Reservation {
    /// Takes `bytes` more; false, and nothing is taken, when the budget does not have them.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let take = |left: usize| left.checked_sub(bytes);
        let grown = self.budget.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        self.bytes += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back() {
        let budget = ByteBudget::new(10);
        let (mut one, mut other) = (budget.reserve_none(), budget.reserve_none());
        assert!(one.grow(4) && other.grow(6));
        assert!(!one.grow(1), "the budget is used up");
        drop(other);
        assert!(one.grow(6));
        assert!(!one.grow(1));
    }
}
