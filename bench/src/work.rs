//! The core's work, piece by piece: what callgrind counts and what the micro-benchmarks time.
//!
//! Nothing here is random, allocates by a clock, or asks the system for anything.

use std::hint::black_box;
use std::time::Duration;

use idem_core::machine;
use idem_core::{
    Acquire, AcquireOutcome, Command, Fingerprint, IdempotencyKey, OnMismatch, Origin, OwnerAction, OwnerToken, Record,
    RecordIdentity, Scope, Settlement, StoredResponse, Takeover, Term, Timestamp,
};

/// A name, and what is done once.
pub(crate) type Piece = (&'static str, fn(&Fixture));

pub(crate) const ALL: [Piece; 8] = [
    ("transition_acquire", |fixture| decide(None, Command::Acquire(&fixture.request), fixture)),
    ("transition_replay", |fixture| decide(Some(&fixture.settled), Command::Acquire(&fixture.request), fixture)),
    ("transition_settle", |fixture| {
        let action = OwnerAction::Settle(&fixture.settlement, fixture.request.term.retention);
        decide(Some(&fixture.acquired), Command::Owner(fixture.request.owner, action), fixture);
    }),
    ("record_id", |fixture| {
        black_box(fixture.identity.record_id(black_box(&fixture.scope), &fixture.key));
    }),
    ("fingerprint_raw_1k", |fixture| {
        black_box(Fingerprint::of_bytes("pay", black_box(&fixture.text)));
    }),
    ("fingerprint_json_1k", |fixture| {
        black_box(Fingerprint::of_json("pay", black_box(&fixture.text)));
    }),
    ("key", |fixture| drop(black_box(IdempotencyKey::new(black_box(fixture.key.as_str()))))),
    ("key_header", |_| {
        let values = black_box([b"\"8e03978e-40d5-43e8-bc93-6894a57f9324\"".as_slice()]);
        drop(black_box(idem_http::parse_key_header(values.into_iter())));
    }),
];

fn decide(record: Option<&Record>, command: Command<'_>, fixture: &Fixture) {
    drop(black_box(machine::transition(black_box(record), black_box(command), fixture.now)));
}

pub(crate) struct Fixture {
    request: Acquire,
    acquired: Record,
    settled: Record,
    settlement: Settlement,
    now: Timestamp,
    identity: RecordIdentity,
    scope: Scope,
    key: IdempotencyKey,
    text: Vec<u8>,
}

impl Fixture {
    pub(crate) fn new() -> Result<Self, Box<dyn std::error::Error>> {
        let scope = Scope::new("tenant-4711", "POST /v1/payments");
        let identity = RecordIdentity::new("bench");
        let key = IdempotencyKey::new("8e03978e-40d5-43e8-bc93-6894a57f9324")?;
        let request = Acquire {
            id: identity.record_id(&scope, &key),
            origin: Origin { namespace: "bench".into(), scope: scope.clone() },
            trace: None,
            fingerprint: Fingerprint::of_bytes("pay", b"the same"),
            owner: OwnerToken::from_bytes([7; 16]),
            term: Term { lease: Duration::from_secs(30), retention: Duration::from_secs(86_400) },
            takeover: Takeover::Rerun,
            max_attempts: std::num::NonZeroU32::MAX,
            on_mismatch: OnMismatch::Refuse,
        };
        let now = Timestamp::from_unix_micros(1_700_000_000_000_000);
        let (Some(acquired), AcquireOutcome::Acquired(_)) = machine::acquire(None, &request, now) else {
            return Err("a fresh key was not acquired".into());
        };
        let settlement = Settlement::Completed(StoredResponse::outcome_unknown());
        let action = OwnerAction::Settle(&settlement, request.term.retention);
        let (Some(settled), _) = machine::apply(Some(&acquired), request.owner, action, now) else {
            return Err("a record was not settled".into());
        };
        let text = crate::document::document(1 << 10)?;
        Ok(Self { request, acquired, settled, settlement, now, identity, scope, key, text })
    }
}
