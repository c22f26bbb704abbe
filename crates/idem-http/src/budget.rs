//! A memory budget for request bodies, with a share for each principal.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::principal_limit::PrincipalPlace;
use crate::problem::ProblemKind;

/// A shared budget of bytes. Clones share it.
///
/// # Shares
/// While one principal alone holds bytes, it may hold a quarter of the budget. It may hold less while others use the budget:
/// for each byte of its bodies, three must stay free. So each further principal can take a quarter of what is left, where a
/// fixed quarter would leave nothing after four principals. [`share`](Self::share) sets another fraction.
///
/// A principal's only body is bounded by the budget alone, so a share never refuses a request that an idle server would take.
/// Bodies without a principal, as in a single-tenant layer, have no share to keep to.
#[derive(Clone)]
pub struct ByteBudget {
    total: usize,
    share: usize,
    state: Arc<Mutex<State>>,
    /// Hashes principals with a random key. Principals whose hashes collide share one share; the key keeps clients from
    /// finding collisions.
    hashes: RandomState,
}

struct State {
    left: usize,
    /// The principals that hold bytes now, by their hash.
    holders: HashMap<u64, Holder>,
}

#[derive(Default)]
struct Holder {
    bodies: usize,
    bytes: usize,
}

/// Bytes taken from a budget, given back when dropped, with the place of their request among those of its principal.
pub struct Reservation {
    budget: ByteBudget,
    principal: Option<u64>,
    bytes: usize,
    place: Option<PrincipalPlace>,
}

impl ByteBudget {
    /// A budget of `bytes`, of which one principal may hold a quarter.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let state = State { left: bytes, holders: HashMap::new() };
        Self { total: bytes, share: bytes / 4, state: Arc::new(Mutex::new(state)), hashes: RandomState::new() }
    }

    /// Sets how many bytes one principal may hold while no other holds any. Default: a quarter, which leaves three quarters
    /// to the others.
    ///
    /// The whole budget, or more, disables shares. Use that where one principal stands for many clients, such as a gateway.
    /// Set it before cloning.
    #[must_use]
    pub fn share(mut self, bytes: usize) -> Self {
        self.share = bytes;
        self
    }

    /// The size of the budget in bytes, taken or free.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// An empty reservation for a body of `principal`; [`grow`](Reservation::grow) takes bytes. `None` has no share to keep to.
    #[must_use]
    pub fn reserve_none(&self, principal: Option<&str>) -> Reservation {
        let principal = principal.map(|principal| self.hashes.hash_one(principal));
        Reservation { budget: self.clone(), principal, bytes: 0, place: None }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a principal may hold `held` bytes if `left` bytes stay free.
    fn is_within_share(&self, held: usize, left: usize) -> bool {
        let others = self.total.saturating_sub(self.share);
        held as u128 * others as u128 <= self.share as u128 * left as u128
    }
}

impl Reservation {
    /// Holds a place among the requests of a principal as long as the bytes.
    pub(crate) fn with_place(mut self, place: Option<PrincipalPlace>) -> Self {
        self.place = place;
        self
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// [`ProblemKind::Overloaded`] if the budget has too few bytes left. [`ProblemKind::ShareExceeded`] if the principal
    /// holds other bodies and would exceed its share. Nothing is taken then.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ProblemKind> {
        if bytes == 0 {
            return Ok(());
        }
        let mut state = self.budget.state();
        let left = state.left.checked_sub(bytes).ok_or(ProblemKind::Overloaded)?;
        if let Some(principal) = self.principal {
            let is_new = self.bytes == 0;
            if let Some(holder) = state.holders.get(&principal) {
                let has_others = holder.bodies > usize::from(!is_new);
                if has_others && !self.budget.is_within_share(holder.bytes.saturating_add(bytes), left) {
                    return Err(ProblemKind::ShareExceeded);
                }
            }
            let holder = state.holders.entry(principal).or_default();
            holder.bodies += usize::from(is_new);
            holder.bytes += bytes;
        }
        state.left = left;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut state = self.budget.state();
        state.left += self.bytes;
        let Some(principal) = self.principal else { return };
        if let Some(holder) = state.holders.get_mut(&principal) {
            holder.bodies -= 1;
            holder.bytes -= self.bytes;
            if holder.bodies == 0 {
                state.holders.remove(&principal);
            }
        }
    }
}

/// Shows no principal, not even hashed.
impl fmt::Debug for ByteBudget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.state().left;
        formatter
            .debug_struct("ByteBudget")
            .field("total", &self.total)
            .field("share", &self.share)
            .field("left", &left)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reservation").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OVERLOADED: Result<(), ProblemKind> = Err(ProblemKind::Overloaded);
    const OVER_SHARE: Result<(), ProblemKind> = Err(ProblemKind::ShareExceeded);

    fn holders(budget: &ByteBudget) -> usize {
        budget.state().holders.len()
    }

    fn left(budget: &ByteBudget) -> usize {
        budget.state().left
    }

    /// Opens bodies of one byte until one is refused.
    fn take_all(budget: &ByteBudget, principal: &str) -> Vec<Reservation> {
        let mut taken = Vec::new();
        loop {
            let mut body = budget.reserve_none(Some(principal));
            if body.grow(1).is_err() {
                return taken;
            }
            taken.push(body);
        }
    }

    #[test]
    fn what_is_taken_is_given_back() {
        let budget = ByteBudget::new(10);
        for principals in [[None, None], [Some("a"), Some("b")]] {
            let [mut one, mut other] = principals.map(|principal| budget.reserve_none(principal));
            assert_eq!((one.grow(4), other.grow(6)), (Ok(()), Ok(())));
            assert_eq!(one.grow(1), OVERLOADED, "the budget is used up");
            drop(other);
            assert_eq!(one.grow(6), Ok(()));
            assert_eq!(one.grow(1), OVERLOADED);
        }
    }

    #[test]
    fn one_principal_holds_a_quarter_and_the_others_go_on() {
        let budget = ByteBudget::new(400);
        let greedy = take_all(&budget, "greedy");
        assert_eq!(greedy.len(), 100);
        let mut other = budget.reserve_none(Some("other"));
        assert_eq!(other.grow(300), Ok(()), "one body has the rest of the budget");
        assert_eq!(budget.reserve_none(Some("greedy")).grow(1), OVERLOADED);
        drop((greedy, other));
        assert_eq!(budget.reserve_none(Some("greedy")).grow(400), Ok(()));
    }

    #[test]
    fn many_principals_together_leave_room_for_another() {
        let budget = ByteBudget::new(19 * 100);
        let names: Vec<String> = (0..16).map(|at| at.to_string()).collect();
        let taken: Vec<Vec<Reservation>> = names.iter().map(|name| take_all(&budget, name)).collect();
        let held: usize = taken.iter().map(Vec::len).sum();
        assert!(held <= 19 * 100 - 15, "{held} bytes are held");
        assert_eq!(budget.reserve_none(Some("another")).grow(10), Ok(()));
    }

    #[test]
    fn the_only_body_of_a_principal_is_bounded_by_the_budget_alone() {
        let budget = ByteBudget::new(100);
        let mut only = budget.reserve_none(Some("a"));
        assert_eq!((only.grow(50), only.grow(40)), (Ok(()), Ok(())));
        assert_eq!(budget.reserve_none(Some("a")).grow(1), OVER_SHARE);
        assert_eq!(only.grow(10), Ok(()), "a refused body is none");
        assert_eq!(only.grow(1), OVERLOADED);
    }

    #[test]
    fn two_bodies_of_a_principal_share_its_share() {
        let budget = ByteBudget::new(100);
        let (mut one, mut two) = (budget.reserve_none(Some("a")), budget.reserve_none(Some("a")));
        assert_eq!((one.grow(10), two.grow(15)), (Ok(()), Ok(())));
        assert_eq!((one.grow(1), two.grow(1)), (OVER_SHARE, OVER_SHARE));
        drop(two);
        assert_eq!(one.grow(1), Ok(()));
    }

    #[test]
    fn no_share_is_kept_for_a_single_tenant_and_where_it_is_the_whole_budget() {
        let (single, whole) = (ByteBudget::new(100), ByteBudget::new(100).share(100));
        for (budget, principal) in [(&single, None), (&whole, Some("a"))] {
            let bodies = [60, 40].map(|bytes| {
                let mut body = budget.reserve_none(principal);
                assert_eq!(body.grow(bytes), Ok(()));
                body
            });
            drop(bodies);
        }
        assert!(ByteBudget::new(usize::MAX).share(usize::MAX).is_within_share(usize::MAX, 0));
    }

    #[test]
    fn a_principal_that_holds_nothing_is_forgotten() {
        let budget = ByteBudget::new(10);
        let mut bodies: Vec<Reservation> = ["a", "a", "b"].map(|name| budget.reserve_none(Some(name))).into();
        assert_eq!(holders(&budget), 0, "nothing has arrived");
        for body in &mut bodies {
            assert_eq!((body.grow(0), body.grow(1)), (Ok(()), Ok(())));
        }
        assert_eq!(holders(&budget), 2);
        assert_eq!(budget.reserve_none(Some("c")).grow(11), OVERLOADED);
        bodies.remove(0);
        assert_eq!(holders(&budget), 2, "it has another body, and the refused one left nothing");
        bodies.clear();
        assert_eq!(holders(&budget), 0);
    }

    #[test]
    fn no_principal_is_in_debug_output() {
        let budget = ByteBudget::new(10);
        let mut body = budget.reserve_none(Some("secret"));
        assert_eq!(body.grow(1), Ok(()));
        assert_eq!(format!("{budget:?}"), "ByteBudget { total: 10, share: 2, left: 9, .. }");
        assert_eq!(format!("{body:?}"), "Reservation { bytes: 1, .. }");
    }

    proptest! {
        /// Bodies that grow and end in any order.
        #[test]
        fn the_sums_stay_right(steps in prop::collection::vec((0..8_usize, 0..40_usize), 0..60)) {
            let budget = ByteBudget::new(100);
            let principal = |at: usize| (at > 0).then(|| (at % 3).to_string());
            let mut bodies: Vec<Reservation> = (0..8).map(|at| budget.reserve_none(principal(at).as_deref())).collect();
            for (at, bytes) in steps {
                if bytes >= 30 {
                    bodies[at] = budget.reserve_none(principal(at).as_deref());
                } else {
                    let _ = bodies[at].grow(bytes);
                }
                let held: usize = bodies.iter().map(|body| body.bytes).sum();
                prop_assert_eq!(left(&budget), 100 - held);
                let principals = bodies.iter().filter(|body| body.bytes > 0).filter_map(|body| body.principal);
                let principals: std::collections::HashSet<u64> = principals.collect();
                prop_assert_eq!(holders(&budget), principals.len());
            }
            drop(bodies);
            prop_assert_eq!((left(&budget), holders(&budget)), (100, 0));
        }
    }
}
