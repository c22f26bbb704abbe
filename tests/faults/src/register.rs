//! Checks linearizability: whether some order of the operations on a key explains every answer. The register holds the claim on
//! the key and its outcome.
//!
//! Herlihy and Wing, "Linearizability: A Correctness Condition for Concurrent Objects" (1990); the search is that of Wing and
//! Gong with the memory of Lowe, "Testing for linearizability" (2017). An answer that only reads is placed as soon as it fits.
//! That loses nothing, so the search branches only where runs begin and end.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::checker::{Known, Promise};
use crate::history::{Operation, Word};

/// The state of a key, as clients can observe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Register {
    /// No run holds it. The amount is that of an earlier request, which the store may remember.
    Free(Option<i64>),
    /// A request for this amount runs.
    Running(i64, Owner),
    /// It is settled. The digest of its answer is set once a client has seen it.
    Settled(i64, Option<u64>),
    /// Its owner died, and nothing may run.
    Unknown(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Owner {
    /// An operation whose client got the answer of this run.
    Told(usize),
    /// An operation whose client did not.
    Untold,
}

/// What an answer says about the register, at some time between the operation's beginning and end.
#[derive(Debug, Clone, Copy)]
enum Claim {
    /// It ran, and settled.
    Ran {
        digest: u64,
    },
    /// It is settled. The digest is known if the answer is a replay.
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
    /// It may be settled after its answer was sent, and so too late.
    is_behind: bool,
}

/// Whether some order explains all answers for one key.
pub(crate) fn is_linearizable(operations: &[&Operation], known: &Known, promise: Promise) -> bool {
    let mut events = Vec::new();
    // By amount: from when an operation without a final answer may claim the key.
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
            // If the body was too large to retain, the answer is a problem with its own digest.
            Some((Word::Settled, answer)) => Claim::Settled(answer.is_replay.then_some(answer.digest)),
            Some((Word::InProgress, _)) => Claim::Running,
            Some((Word::Unknown, _)) => Claim::Unknown,
            Some((Word::Mismatch, _)) => Claim::Other,
        };
        // For this long, a stale lock in front of the store may report a run in progress.
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

/// The progress of one order.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Reached {
    register: Register,
    /// A bit for each event, set once the event is placed.
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

    /// Places every answer that reads the current state of the register.
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

    /// When the first unplaced event ends; no event that begins later can come before it. `None` if all are placed.
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

    /// The events that are not yet placed, by their beginning.
    fn unplaced(&self, reached: &Reached) -> impl Iterator<Item = (usize, &'a Event)> + use<'a> {
        let placed = reached.placed.clone();
        let first = placed.iter().take_while(|word| **word == u64::MAX).count() * 64;
        let events = self.events.iter().enumerate().skip(first);
        events.filter(move |(number, _)| placed[number / 64] & 1 << (number % 64) == 0)
    }

    /// Adds every state that the register can reach next.
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
                    // The lease expired before the store accepted the settlement.
                    if event.is_behind {
                        go(Register::Unknown(amount), Some(number));
                    }
                }
                Owner::Untold => {
                    go(Register::Settled(amount, None), None);
                    // It failed or was rolled back.
                    go(Register::Free(Some(amount)), None);
                }
            }
            go(Register::Unknown(amount), None);
        }
        for (number, amount) in self.claimants(reached, until) {
            let owner = number.map_or(Owner::Untold, Owner::Told);
            let may_claim = match reached.register {
                Register::Free(_) => true,
                // If the contract allows it, a run takes over from a dead owner or an expired lease.
                Register::Running(held, from) => !self.at_most_once && held == amount && from != owner,
                Register::Settled(..) | Register::Unknown(_) => false,
            };
            if may_claim {
                // A run that can lose its lease answers its own client, regardless of the record.
                let placed = number.filter(|_| !self.at_most_once);
                go(Register::Running(amount, owner), placed);
            }
        }
    }

    /// Lists the operations that may begin to run:
    ///
    /// - those whose answer comes from their own run;
    /// - those without a final answer, each amount once;
    /// - those whose answer reports a run that was theirs, because the store's answer was lost and the service asked again, or
    ///   because the run lost its lease.
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
