//! The plan of a faulty store: which call fails, and how.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};

/// A verb that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// [`IdempotencyStore::acquire`](idem_core::IdempotencyStore::acquire).
    Acquire,
    /// [`IdempotencyStore::renew`](idem_core::IdempotencyStore::renew).
    Renew,
    /// [`IdempotencyStore::checkpoint`](idem_core::IdempotencyStore::checkpoint).
    Checkpoint,
    /// [`IdempotencyStore::settle`](idem_core::IdempotencyStore::settle).
    Settle,
    /// [`IdempotencyStore::peek`](idem_core::IdempotencyStore::peek).
    Peek,
    /// [`DurableStore::live_record`](idem_core::DurableStore::live_record).
    LiveRecord,
    /// [`TransactionalStore::begin`](idem_core::TransactionalStore::begin).
    Begin,
    /// [`StoreTransaction::finish`](idem_core::StoreTransaction::finish).
    Finish,
    /// [`Operate::resolve`](idem_core::Operate::resolve).
    Resolve,
    /// [`Operate::erase`](idem_core::Operate::erase).
    Erase,
}

/// What happens to one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The call goes through. For scripts in which a later call fails.
    None,
    /// It is not executed, and answers [`StoreErrorKind::Unavailable`].
    ErrorBefore,
    /// It is executed, and answers [`StoreErrorKind::Unavailable`], indeterminate.
    ErrorAfter,
    /// It is executed after this time on tokio's clock, and answers.
    Delay(Duration),
    /// It is executed, and answers after this time.
    AnswerLater(Duration),
    /// It is executed and never answers.
    LostAnswer,
    /// It never answers, and is executed after this time, whether or not the caller still waits. A stalled store does so when
    /// it goes on.
    Late(Duration),
    /// It is not executed, and answers this kind of error.
    Refuse(StoreErrorKind),
    /// It panics before it is executed.
    Panic,
}

/// The script of each verb, random faults for calls without a script, and counters.
#[derive(Debug, Default)]
pub(super) struct Plan(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    scripts: HashMap<Verb, VecDeque<Fault>>,
    chance: Option<Chance>,
    calls: HashMap<Verb, u64>,
    fired: u64,
}

#[derive(Debug)]
struct Chance {
    state: u64,
    one_in: u64,
    faults: Vec<Fault>,
}

impl Plan {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn script(&self, verb: Verb, faults: impl IntoIterator<Item = Fault>) {
        self.lock().scripts.entry(verb).or_default().extend(faults);
    }

    pub(super) fn random(&self, seed: u64, one_in: u32, faults: Vec<Fault>) {
        let chance = Chance { state: seed, one_in: u64::from(one_in.max(1)), faults };
        self.lock().chance = Some(chance).filter(|chance| !chance.faults.is_empty());
    }

    pub(super) fn heal(&self) {
        let mut inner = self.lock();
        inner.scripts.clear();
        inner.chance = None;
    }

    pub(super) fn calls(&self, verb: Verb) -> u64 {
        self.lock().calls.get(&verb).copied().unwrap_or(0)
    }

    pub(super) fn fired(&self) -> u64 {
        self.lock().fired
    }

    fn draw(&self, verb: Verb) -> Fault {
        let mut inner = self.lock();
        *inner.calls.entry(verb).or_default() += 1;
        let scripted = inner.scripts.get_mut(&verb).and_then(VecDeque::pop_front);
        let fault = scripted.unwrap_or_else(|| inner.chance.as_mut().map_or(Fault::None, Chance::draw));
        // A lost answer counts only when there is an answer.
        inner.fired += u64::from(!matches!(fault, Fault::None | Fault::LostAnswer));
        fault
    }

    /// Runs `call` with the next fault of the plan.
    pub(super) async fn call<T>(
        &self,
        verb: Verb,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
    {
        match self.draw(verb) {
            Fault::None => call.await,
            Fault::ErrorBefore => Err(StoreError::new(StoreErrorKind::Unavailable, "injected before the call")),
            Fault::ErrorAfter => {
                call.await?;
                Err(StoreError::new(StoreErrorKind::Unavailable, "injected after the call").indeterminate())
            }
            Fault::Delay(delay) => {
                tokio::time::sleep(delay).await;
                call.await
            }
            Fault::AnswerLater(delay) => {
                let answer = call.await;
                tokio::time::sleep(delay).await;
                answer
            }
            Fault::LostAnswer => {
                call.await?;
                self.lock().fired += 1;
                std::future::pending().await
            }
            Fault::Late(delay) => {
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    // The caller gave up long ago.
                    let _ = call.await;
                });
                std::future::pending().await
            }
            Fault::Refuse(kind) => Err(StoreError::new(kind, "injected instead of the call")),
            Fault::Panic => panic!("injected instead of the call"),
        }
    }
}

impl Chance {
    /// SplitMix64: good enough to scatter faults, and the same on every run with the same seed.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn draw(&mut self) -> Fault {
        if !self.next().is_multiple_of(self.one_in) {
            return Fault::None;
        }
        let at = self.next() % self.faults.len() as u64;
        self.faults[at as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the reference implementation from seed 0.
    #[test]
    fn chance_is_split_mix_64() {
        let mut chance = Chance { state: 0, one_in: 1, faults: vec![Fault::ErrorBefore] };
        let numbers = [chance.next(), chance.next(), chance.next()];
        assert_eq!(numbers, [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]);
    }
}
