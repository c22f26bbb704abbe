//! The steps of random sequences.

use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{
    Acquire, Checkpoint, Fingerprint, Lease, OnMismatch, Origin, OwnerToken, Scope, Settlement, StoredBody,
    StoredResponse, Takeover, Term,
};
use proptest::prelude::*;

use crate::model::Operation;

/// Few records and few owners, so that steps meet each other.
pub(super) const IDS: usize = 3;
const OWNERS: u8 = 3;

/// One step; durations are counted in quanta of the [`Grid`].
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// The time since the previous step.
    pub(super) pause: u32,
    /// Whether the pause is a microsecond shorter, to come just before a boundary.
    pub(super) early: bool,
    pub(super) id: usize,
    pub(super) owner: u8,
    pub(super) verb: Verb,
    /// Whether the verb is sent again at once.
    pub(super) repeat: bool,
}

#[derive(Debug, Clone)]
pub(super) enum Verb {
    Acquire { other_body: bool, lease: u32, retention: u32, takeover: Takeover, max_attempts: u32, lenient: bool },
    Renew { lease: u32, retention: u32 },
    Checkpoint { sequence: u32, name: u8 },
    Settle { ending: Ending, response: u8, retention: u32 },
    Peek,
    Purge { limit: u32 },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Ending {
    Completed,
    FailedTerminal,
    FailedRetryable { retry_after: u32 },
    OutcomeUnknown,
    Released,
}

/// Converts quanta to time.
///
/// With a manual clock, all durations are whole quanta, so that steps meet boundaries exactly. With a running clock, leases,
/// retentions and pauses differ by parts of a quantum. Then no step comes so close to a boundary that the clock decides on
/// which side it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    quantum: Duration,
    exact: bool,
}

impl Grid {
    pub(super) fn new(precision: Duration) -> Self {
        let exact = precision.is_zero();
        // Boundaries are at quarters of a quantum, and must stay more than a precision away from any step.
        let quantum = if exact { Duration::from_secs(1) } else { precision * 16 };
        Self { quantum, exact }
    }

    pub(super) fn pause(self, step: &Step) -> Duration {
        let early = step.early && self.exact && step.pause > 0;
        self.quantum * step.pause - if early { Duration::from_micros(1) } else { Duration::ZERO }
    }

    fn off(self, quanta: u32, quarters: u32) -> Duration {
        let offset = if self.exact { Duration::ZERO } else { self.quantum / 4 * quarters };
        self.quantum * quanta + offset
    }

    fn lease(self, quanta: u32) -> Duration {
        self.off(quanta, 2)
    }

    fn retention(self, quanta: u32) -> Duration {
        self.off(quanta, 1)
    }
}

pub(super) fn owner(number: u8) -> OwnerToken {
    OwnerToken::from_bytes([number + 1; 16])
}

/// The verb as sent by an owner that holds or once held `lease`.
pub(super) fn operation(verb: &Verb, lease: Lease, grid: Grid) -> Operation {
    let term = |lease, retention| Term { lease: grid.lease(lease), retention: grid.retention(retention) };
    match *verb {
        Verb::Acquire { other_body, lease: quanta, retention, takeover, max_attempts, lenient } => {
            Operation::Acquire(Acquire {
                id: lease.id,
                origin: Origin { namespace: "idem-testkit".into(), scope: Scope::new("acme", "state machine") },
                trace: None,
                fingerprint: Fingerprint::of_bytes("state machine", if other_body { b"b" } else { b"a" }),
                owner: lease.owner,
                term: term(quanta, retention),
                takeover,
                max_attempts: NonZeroU32::MIN.saturating_add(max_attempts),
                on_mismatch: if lenient { OnMismatch::ReplayOriginal } else { OnMismatch::Refuse },
            })
        }
        Verb::Renew { lease: quanta, retention } => Operation::Renew(lease, term(quanta, retention)),
        Verb::Checkpoint { sequence, name } => {
            let data = vec![name; usize::from(name)].into();
            Operation::Checkpoint(lease, Checkpoint { sequence, name: format!("step {name}").into(), data })
        }
        Verb::Settle { ending, response: number, retention } => {
            let response = response(number);
            let settlement = match ending {
                Ending::Completed => Settlement::Completed(response),
                Ending::FailedTerminal => Settlement::FailedTerminal(response),
                Ending::FailedRetryable { retry_after } => {
                    Settlement::FailedRetryable { response, retry_after: grid.lease(retry_after) }
                }
                Ending::OutcomeUnknown => Settlement::OutcomeUnknown,
                Ending::Released => Settlement::Released,
            };
            Operation::Settle(lease, settlement, grid.retention(retention))
        }
        Verb::Peek | Verb::Purge { .. } => Operation::Peek(lease.id),
    }
}

fn response(number: u8) -> StoredResponse {
    match number {
        0 => crate::fixture::response(),
        1 => StoredResponse::new(204, ""),
        _ => StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(200, "") },
    }
}

pub(super) fn sequence() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..=40)
}

fn step() -> impl Strategy<Value = Step> {
    let pause = prop_oneof![3 => Just(0_u32), 3 => 1..=2_u32, 1 => 3..=8_u32];
    let id = prop_oneof![4 => Just(0_usize), 2 => Just(1), 1 => Just(IDS - 1)];
    (pause, prop::bool::weighted(0.1), id, 0..OWNERS, verb(), prop::bool::weighted(0.2))
        .prop_map(|(pause, early, id, owner, verb, repeat)| Step { pause, early, id, owner, verb, repeat })
}

fn takeover() -> impl Strategy<Value = Takeover> {
    prop_oneof![6 => Just(Takeover::Rerun), 1 => Just(Takeover::Unknown), 2 => Just(Takeover::Probe)]
}

fn verb() -> impl Strategy<Value = Verb> {
    // No time is zero: a record would be gone before its settlement could be repeated.
    let short = || 1..=4_u32;
    let rarely = || prop::bool::weighted(0.2);
    prop_oneof![
        8 => (rarely(), short(), short(), takeover(), 0..=3_u32, any::<bool>()).prop_map(
            |(other_body, lease, retention, takeover, max_attempts, lenient)| Verb::Acquire {
                other_body, lease, retention, takeover, max_attempts, lenient,
            }
        ),
        2 => (short(), short()).prop_map(|(lease, retention)| Verb::Renew { lease, retention }),
        2 => (0..=3_u32, 0..=2_u8).prop_map(|(sequence, name)| Verb::Checkpoint { sequence, name }),
        5 => (ending(), 0..=2_u8, 1..=8_u32)
            .prop_map(|(ending, response, retention)| Verb::Settle { ending, response, retention }),
        1 => Just(Verb::Peek),
        1 => (1..=5_u32).prop_map(|limit| Verb::Purge { limit }),
    ]
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        2 => Just(Ending::Completed),
        1 => Just(Ending::FailedTerminal),
        3 => (0..=2_u32).prop_map(|retry_after| Ending::FailedRetryable { retry_after }),
        1 => Just(Ending::OutcomeUnknown),
        1 => Just(Ending::Released),
    ]
}
