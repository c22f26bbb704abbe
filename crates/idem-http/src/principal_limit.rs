//! How many requests of one principal may be in progress at once.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts the requests in progress of each principal. Clones count together.
#[derive(Clone)]
pub(crate) struct PrincipalLimit(Arc<Counts>);

struct Counts {
    most: usize,
    /// Those that have any now.
    requests: Mutex<HashMap<String, usize>>,
}

/// A place among the requests of a principal, given back when dropped.
pub(crate) struct PrincipalPlace {
    counts: Arc<Counts>,
    principal: String,
}

impl PrincipalLimit {
    /// `most` is at least 1.
    pub(crate) fn new(most: usize) -> Self {
        Self(Arc::new(Counts { most: most.max(1), requests: Mutex::default() }))
    }

    /// Takes a place. The error is how many requests of the principal are in progress.
    pub(crate) fn enter(&self, principal: &str) -> Result<PrincipalPlace, usize> {
        let mut requests = self.0.requests();
        match requests.get_mut(principal) {
            Some(count) if *count >= self.0.most => return Err(*count),
            Some(count) => *count += 1,
            None => {
                requests.insert(principal.to_owned(), 1);
            }
        }
        Ok(PrincipalPlace { counts: Arc::clone(&self.0), principal: principal.to_owned() })
    }
}

impl Counts {
    fn requests(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Nothing panics while it is locked.
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PrincipalPlace {
    fn drop(&mut self) {
        let mut requests = self.counts.requests();
        if let Some(count) = requests.get_mut(&self.principal) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&self.principal);
            }
        }
    }
}

/// Shows no principal.
impl fmt::Debug for PrincipalLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PrincipalLimit").field("most", &self.0.most).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_principal_has_so_many_places_and_gives_them_back() {
        let limit = PrincipalLimit::new(2);
        let (first, second) = (limit.enter("a").ok(), limit.clone().enter("a").ok());
        assert!(first.is_some() && second.is_some());
        assert_eq!(limit.enter("a").err(), Some(2));
        let other = limit.enter("b").ok();
        assert!(other.is_some());
        drop(first);
        let third = limit.enter("a").ok();
        assert!(third.is_some());
        assert_eq!(limit.enter("a").err(), Some(2));
        drop((second, third, other));
        assert!(limit.0.requests().is_empty(), "a principal without requests is forgotten");
    }

    #[test]
    fn no_principal_is_in_debug_output() {
        let limit = PrincipalLimit::new(0);
        let place = limit.enter("secret");
        assert!(place.is_ok(), "at least one request is let in");
        assert_eq!(format!("{limit:?}"), "PrincipalLimit { most: 1, .. }");
    }
}
