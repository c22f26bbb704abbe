//! The records whose checkpoint did not open.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use idem_core::RecordId;

/// The limit. Beyond it the oldest is forgotten, and the next acquire of that record costs an attempt again.
const MOST: usize = 1_024;

/// The records whose checkpoint did not open when they were acquired, the oldest first. It is empty while no key is missing.
///
/// An acquire whose checkpoint does not open has begun an attempt, and attempts are few. So the next acquire of such a record reads it
/// before.
#[derive(Debug, Default)]
pub(crate) struct Unopened(Mutex<VecDeque<RecordId>>);

impl Unopened {
    fn known(&self) -> MutexGuard<'_, VecDeque<RecordId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn contains(&self, id: &RecordId) -> bool {
        self.known().contains(id)
    }

    pub(crate) fn add(&self, id: &RecordId) {
        let mut known = self.known();
        if known.contains(id) {
            return;
        }
        if known.len() == MOST {
            known.pop_front();
        }
        known.push_back(*id);
    }

    pub(crate) fn remove(&self, id: &RecordId) {
        self.known().retain(|known| known != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_at_the_limit() {
        let unopened = Unopened::default();
        let id = |number: usize| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&(number as u64).to_be_bytes());
            RecordId::from_bytes(id)
        };
        for number in [0, 0].into_iter().chain(1..=MOST) {
            unopened.add(&id(number));
        }
        assert!(!unopened.contains(&id(0)) && unopened.contains(&id(1)) && unopened.contains(&id(MOST)));
        unopened.remove(&id(1));
        assert!(!unopened.contains(&id(1)) && unopened.contains(&id(2)));
    }
}
