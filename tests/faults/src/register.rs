//! Whether there is an order of what happened to a key that explains every answer: linearizability, of the register that says
//! who has claimed the key and what came of it.
//!
//! Herlihy and Wing, "Linearizability: A Correctness Condition for Concurrent Objects" (1990); the search is that of Wing and
//! Gong with the memory of Lowe, "Testing for linearizability" (2017). An answer that only reads is taken as soon as it fits,
//! which loses nothing, so that the search branches where runs begin and end, and nowhere else.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::checker::{Known, Promise};
use crate::history::{Operation, Word};

/// What a key is, as far as clients can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Register {
    /// Nobody has it. Whose it was before, by the amount that was asked for, may be remembered.
    Free(Option<i64>),
    /// It runs for somebody who asked for this amount.
    Running(i64, Owner),
    /// It has been settled, by this answer once somebody has seen it.
    Settled(i64, Option<u64>),
    /// Its owner died, and nothing may run.
    Unknown(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Owner {
    /// An operation that got the first answer.
    Told(usize),
    /// One of those that were not.
    Untold,
}

/// What an operation says of the register, at some time between its beginning and its end.
#[derive(Debug, Clone, Copy)]
enum Claim {
    /// It ran, and settled.
    Ran {
        digest: u64,
    },
    /// It is settled, by this answer if that is one for all.
    Settled(Option<u64>),
    Running,
    Unknown,
    /// It belongs to a request for another amount.
    Other,
}

#[derive(Debug)]
struct Event {
    began: Duration,
    ended: Duration,
    amount: i64,
    claim: Claim,
    /// It may be settled after its answer, and so too late.
    is_behind: bool,
}

/// Whether the answers for one key have an order.
pub(crate) fn is_linearizable(operations: &[&Operation], known: &Known, promise: Promise) -> bool {
    let mut events = Vec::new();
    // Since when somebody who was told nothing for good may claim the key, by the amount.
    let mut untold = BTreeMap::<i64, Duration>::new();
    for operation in operations {
        let Operation { began, ended, amount, answer, .. } = operation;
        let claim = match answer.as_ref().map(|answer| (answer.word(), answer)) {
            None | Some((Word::Later, _)) => {
                let since = untold.entry(*amount).or_insert(*began);
                *since = (*began).min(*since);
                continue;
            }
            Some((Word::Settled, answer)) if operation.is_run() => Claim::Ran { digest: answer.digest },
            // An answer whose body was too large to keep says so in its own words.
            Some((Word::Settled, answer)) => Claim::Settled(answer.is_replay.then_some(answer.digest)),
            Some((Word::InProgress, _)) => Claim::Running,
            Some((Word::Unknown, _)) => Claim::Unknown,
            Some((Word::Mismatch, _)) => Claim::Other,
        };
        // A lock in front of the store may be left over for so long.
        let stale = if matches!(claim, Claim::Running) { promise.stale_lock } else { Duration::ZERO };
        let late_by = promise.settled_late_by(operation, known);
        let (began, ended) = (began.saturating_sub(stale), *ended + late_by);
        events.push(Event { began, ended, amount: *amount, claim, is_behind: !late_by.is_zero() });
    }
    events.sort_by_key(|event| event.began);
    let search = Search { events: &events, untold: &untold, at_most_once: promise.at_most_one_effect };
    search.finds_an_order()
}

struct Search<'a> {
    events: &'a [Event],
    untold: &'a BTreeMap<i64, Duration>,
    at_most_once: bool,
}

/// How far an order has come.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Reached {
    register: Register,
    /// Which events have their place, by the bits of their numbers.
    placed: Vec<u64>,
}

impl<'a> Search<'a> {
    fn finds_an_order(&self) -> bool {
        let start = Reached { register: Register::Free(None), placed: vec![0; self.events.len().div_ceil(64)] };
        let mut seen = HashSet::new();
        let mut open = vec![start];
        while let Some(mut reached) = open.pop() {
            self.place_what_fits(&mut reached);
            let Some(until) = self.horizon(&reached) else { return true };
            if seen.insert(reached.clone()) {
                self.branch(&reached, until, &mut open);
            }
        }
        false
    }

    /// Gives every answer its place that reads what the register is now.
    fn place_what_fits(&self, reached: &mut Reached) {
        loop {
            let Some(until) = self.horizon(reached) else { return };
            let mut has_placed = false;
            for (number, event) in self.unplaced(reached).take_while(|(_, event)| event.began <= until) {
                let fits = match (event.claim, reached.register) {
                    (Claim::Running, Register::Running(..)) | (Claim::Unknown, Register::Unknown(_)) => true,
                    (Claim::Settled(digest), Register::Settled(amount, known)) => {
                        let fits = digest.is_none() || known.is_none() || known == digest;
                        if fits {
                            reached.register = Register::Settled(amount, known.or(digest));
                        }
                        fits
                    }
                    (
                        Claim::Other,
                        Register::Free(Some(amount))
                        | Register::Running(amount, _)
                        | Register::Settled(amount, _)
                        | Register::Unknown(amount),
                    ) => amount != event.amount,
                    _ => false,
                };
                if fits {
                    reached.place(number);
                    has_placed = true;
                }
            }
            if !has_placed {
                return;
            }
        }
    }

    /// When the first event is over that has no place yet; nothing that begins later comes before it. `None` when all have one.
    fn horizon(&self, reached: &Reached) -> Option<Duration> {
        let mut until = None::<Duration>;
        for (_, event) in self.unplaced(reached) {
            match until {
                Some(until) if event.began > until => break,
                _ => until = Some(until.map_or(event.ended, |until| until.min(event.ended))),
            }
        }
        until
    }

    /// The events that have no place yet, by their beginning.
    fn unplaced(&self, reached: &Reached) -> impl Iterator<Item = (usize, &'a Event)> + use<'a> {
        let placed = reached.placed.clone();
        let first = placed.iter().take_while(|word| **word == u64::MAX).count() * 64;
        let events = self.events.iter().enumerate().skip(first);
        events.filter(move |(number, _)| placed[number / 64] & 1 << (number % 64) == 0)
    }

    /// What may happen next to the register.
    fn branch(&self, reached: &Reached, until: Duration, open: &mut Vec<Reached>) {
        let mut go = |register, placed: Option<usize>| {
            let mut next = Reached { register, placed: reached.placed.clone() };
            if let Some(number) = placed {
                next.place(number);
            }
            open.push(next);
        };
        if let Register::Running(amount, owner) = reached.register {
            match owner {
                Owner::Told(number) => {
                    let event = &self.events[number];
                    if let Claim::Ran { digest } = event.claim {
                        go(Register::Settled(amount, Some(digest)), Some(number));
                    }
                    // Its lease was over before the store took the settlement.
                    if event.is_behind {
                        go(Register::Unknown(amount), Some(number));
                    }
                }
                Owner::Untold => {
                    go(Register::Settled(amount, None), None);
                    // It failed, or was rolled back.
                    go(Register::Free(Some(amount)), None);
                }
            }
            go(Register::Unknown(amount), None);
        }
        for (number, amount) in self.claimants(reached, until) {
            let owner = number.map_or(Owner::Untold, Owner::Told);
            let may_claim = match reached.register {
                Register::Free(_) => true,
                // Of a dead owner, or one whose lease is over, where that runs again.
                Register::Running(held, from) => !self.at_most_once && held == amount && from != owner,
                Register::Settled(..) | Register::Unknown(_) => false,
            };
            if may_claim {
                // Where a run can lose its lease, it answers its own client whatever the record says then.
                let placed = number.filter(|_| !self.at_most_once);
                go(Register::Running(amount, owner), placed);
            }
        }
    }

    /// Who may begin to run: those with a first answer; anybody who was told nothing, each amount once; and whoever is told of a
    /// run that was its own, which happens when a store's answer is lost and it asks again, or when it has lost its lease.
    fn claimants(&self, reached: &Reached, until: Duration) -> Vec<(Option<usize>, i64)> {
        let untold = self.untold.iter().filter(|(_, since)| **since <= until);
        let mut claimants: Vec<_> = untold.map(|(amount, _)| (None, *amount)).collect();
        for (number, event) in self.unplaced(reached).take_while(|(_, event)| event.began <= until) {
            let claimant = match event.claim {
                Claim::Ran { .. } => (Some(number), event.amount),
                Claim::Settled(_) | Claim::Running | Claim::Unknown => (None, event.amount),
                Claim::Other => continue,
            };
            if !claimants.contains(&claimant) {
                claimants.push(claimant);
            }
        }
        claimants
    }
}

impl Reached {
    fn place(&mut self, number: usize) {
        self.placed[number / 64] |= 1 << (number % 64);
    }
}
