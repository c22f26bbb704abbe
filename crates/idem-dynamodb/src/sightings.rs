//! How long this process has seen versions of records unchanged.
//!
//! A lease is over for another caller only when the version that granted or renewed it has stayed for the whole of it, by the monotonic
//! clock of the process that takes over. So clocks that differ never make two owners (law L9).

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use idem_core::RecordId;

use crate::item::Version;

/// The sightings of one generation, which take about a megabyte. An older one may be forgotten when as many new ones have come. The
/// process then waits for another lease before it takes over.
const GENERATION: usize = 10_000;

/// What is known of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sighting {
    /// It was seen first at this monotonic time.
    Since(i64),
    /// It is seen for the first time.
    First,
    /// Another version was seen after the request was sent, so that this one may be gone.
    Outdated,
}

#[derive(Debug, Default)]
pub(crate) struct Sightings(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<RecordId, (Version, i64)>,
    old: HashMap<RecordId, (Version, i64)>,
}

impl Sightings {
    /// Takes notice of a version that a request, sent at the monotonic time `sent`, has found. The answer came at `now`.
    pub(crate) fn see(&self, id: &RecordId, version: Version, sent: i64, now: i64) -> Sighting {
        self.with(|generations| {
            match generations.young.get(id).or_else(|| generations.old.get(id)) {
                Some((known, since)) if *known == version => return Sighting::Since(*since),
                Some((_, since)) if *since > sent => return Sighting::Outdated,
                _ => {}
            }
            if generations.young.len() >= GENERATION {
                generations.old = std::mem::take(&mut generations.young);
            }
            generations.young.insert(*id, (version, now));
            Sighting::First
        })
    }

    /// Forgets a record that is not in progress any more.
    pub(crate) fn forget(&self, id: &RecordId) {
        self.with(|generations| {
            generations.young.remove(id);
            generations.old.remove(id);
        });
    }

    fn with<T>(&self, change: impl FnOnce(&mut Generations) -> T) -> T {
        // No change is left half done by a panic.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> RecordId {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        RecordId::from_bytes(bytes)
    }

    #[test]
    fn a_version_is_as_old_as_its_first_sighting() {
        let (sightings, id) = (Sightings::default(), id(1));
        let (one, other) = (Version::random(), Version::random());
        assert_eq!([5, 9].map(|now| sightings.see(&id, one, now, now)), [Sighting::First, Sighting::Since(5)]);
        assert_eq!([12, 13].map(|now| sightings.see(&id, other, now, now)), [Sighting::First, Sighting::Since(12)]);
        sightings.forget(&id);
        assert_eq!(sightings.see(&id, other, 20, 20), Sighting::First);
    }

    #[test]
    fn a_late_answer_does_not_hide_a_newer_version() {
        let (sightings, id) = (Sightings::default(), id(1));
        let (old, new) = (Version::random(), Version::random());
        sightings.see(&id, new, 5, 10);
        assert_eq!(sightings.see(&id, old, 9, 11), Sighting::Outdated);
        assert_eq!(sightings.see(&id, new, 12, 13), Sighting::Since(10));
    }

    #[test]
    fn a_sighting_stays_while_less_than_a_generation_follows() {
        let (sightings, version) = (Sightings::default(), Version::random());
        sightings.see(&id(0), version, 1, 1);
        for number in 1..=GENERATION as u32 {
            sightings.see(&id(number), version, 2, 2);
        }
        assert_eq!(sightings.see(&id(0), version, 3, 3), Sighting::Since(1));
        for number in 0..2 * GENERATION as u32 {
            sightings.see(&id(1_000_000 + number), version, 4, 4);
        }
        assert_eq!(sightings.see(&id(0), version, 5, 5), Sighting::First);
    }
}
