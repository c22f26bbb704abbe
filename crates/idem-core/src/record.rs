//! The record: what a store keeps under a record id.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::fingerprint::Fingerprint;
use crate::timestamp::Timestamp;
use crate::trace::TraceParent;

/// The format number that stores write into every record.
///
/// If a store reads another number, it returns [`StoreErrorKind::Corrupt`](crate::StoreErrorKind::Corrupt). A record
/// that cannot be read means an unknown outcome, and never allows another run.
pub const RECORD_FORMAT: u16 = 1;

/// One idempotent operation, as a store keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Digest of the request that created the record.
    pub fingerprint: Fingerprint,
    /// The owner that may change the record, or that settled it.
    pub owner: OwnerToken,
    /// The fencing token: 1 for the first run, larger for every further run (law L7).
    pub attempt: u32,
    /// The last recovery point that an owner recorded; dropped by a final settlement.
    pub checkpoint: Option<Checkpoint>,
    /// When the record was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// When the record starts to count as absent and may be purged. Never before its lease is over (law L10).
    pub expires_at: Timestamp,
    /// The state of the operation.
    pub state: State,
}

/// Which state of a record a decision is about. A renewal, a checkpoint, a takeover and a settlement give another version.
///
/// As text it has 32 lower-case hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordVersion(Uuid);

/// Text that is no version of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the version of a record has 32 lower-case hexadecimal digits")]
#[non_exhaustive]
pub struct InvalidRecordVersion;

impl Record {
    /// Its version: a digest of its owner, its attempt, the number of its checkpoint, its times and its state.
    #[must_use]
    pub fn version(&self) -> RecordVersion {
        let (state, time) = match &self.state {
            State::InProgress { lease_until, .. } => (1, Some(lease_until)),
            State::Completed { .. } => (2, None),
            State::Failed { failure: Failure::Terminal, .. } => (3, None),
            State::Failed { failure: Failure::OutcomeUnknown, .. } => (4, None),
            State::Failed { failure: Failure::Retryable { not_before }, .. } => (5, Some(not_before)),
        };
        let checkpoint = self.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.sequence);
        let mut hash = Sha256::new();
        hash.update(self.owner.as_bytes());
        hash.update(self.attempt.to_be_bytes());
        hash.update(checkpoint.to_be_bytes());
        for time in [Some(&self.created_at), Some(&self.updated_at), Some(&self.expires_at), time] {
            hash.update(time.map_or(0, |time| time.unix_micros()).to_be_bytes());
        }
        hash.update([state]);
        let mut version = [0; 16];
        version.copy_from_slice(&hash.finalize()[..16]);
        RecordVersion(Uuid::from_bytes(version))
    }
}

impl fmt::Display for RecordVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0.as_simple())
    }
}

impl FromStr for RecordVersion {
    type Err = InvalidRecordVersion;

    fn from_str(text: &str) -> Result<Self, InvalidRecordVersion> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return Err(InvalidRecordVersion);
        }
        Uuid::try_parse(text).map(Self).map_err(|_| InvalidRecordVersion)
    }
}

/// The state of an operation. Exhaustive on purpose: a store that forgets a state must not compile.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store that forgets a state must not compile")]
pub enum State {
    /// An owner runs it, or crashed while running it.
    InProgress {
        /// When the owner's lease ends.
        lease_until: Timestamp,
        /// How the owner acquired the record.
        acquisition: Acquisition,
        /// What the owner's contract says about a crash.
        takeover: Takeover,
    },
    /// It ended, and this is its answer.
    Completed {
        /// What every repeat gets.
        response: StoredResponse,
    },
    /// It failed.
    Failed {
        /// Whether it may run again.
        failure: Failure,
        /// What the run answered; repeats get it once the failure is terminal.
        response: StoredResponse,
    },
}

/// Whether a failed operation may run again. Exhaustive on purpose, as [`State`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store that forgets a failure must not compile")]
pub enum Failure {
    /// Never again: repeats get the stored response.
    Terminal,
    /// It is not known whether it took effect, so it does not run again unless an operator [resolves](crate::Resolve) it. Its lease
    /// ran out under [`Takeover::Unknown`], or a probe could not find out.
    OutcomeUnknown,
    /// It may run again.
    Retryable {
        /// The earliest time of the next attempt.
        not_before: Timestamp,
    },
}

/// How an owner acquired a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a store that forgets one must not compile")]
pub enum Acquisition {
    /// There was no record.
    Fresh,
    /// The previous owner's lease ran out.
    Takeover,
    /// The previous attempt failed and may be retried.
    Retry,
    /// The previous owner's lease ran out, and it is not known whether the run took effect. The new owner has a probe,
    /// and must ask it before it runs anything.
    Probe,
}

/// What happens to an operation whose lease ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a contract that is not translated must not compile")]
pub enum Takeover {
    /// The operation may run again: it is safe to repeat, or the crash rolled it back.
    Rerun,
    /// It is not known whether it took effect: repeats get that answer, and it does not run again.
    Unknown,
    /// As `Unknown`, but an owner that acquires under this policy has a probe, and gets the record to find out
    /// ([`Acquisition::Probe`]).
    Probe,
}

impl Takeover {
    /// Combines the policy of the crashed owner, `self`, with that of the new owner, `newcomer`.
    ///
    /// The operation runs again only if both say `Rerun`. If not, a newcomer that says `Probe` has to find out first,
    /// and for any other newcomer the outcome is unknown. So a rolling deploy that changes a route's contract breaks
    /// neither side's promise. A retryable failure runs again under every contract: before a route changes to AtMostOnce, let those
    /// of AtLeastOnce end.
    #[must_use]
    pub fn met_by(self, newcomer: Self) -> Self {
        match (self, newcomer) {
            (Self::Rerun, Self::Rerun) => Self::Rerun,
            (_, Self::Probe) => Self::Probe,
            (Self::Unknown | Self::Probe, _) | (_, Self::Unknown) => Self::Unknown,
        }
    }
}

/// 128 random bits that identify one acquire. Knowing the token proves ownership.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwnerToken(Uuid);

impl OwnerToken {
    /// The owner of a record that was released but has to be kept. No random token equals it: those have bits that are
    /// always set (RFC 9562 section 5.4).
    pub const NOBODY: Self = Self(Uuid::nil());

    /// A unique token. Its bits come from the operating system on every call: a generator in memory would give the same
    /// bits to two machines that resume from one snapshot.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// A token read back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for OwnerToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "OwnerToken({})", self.0)
    }
}

/// A named recovery point with data for the attempt that takes over.
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its number among the checkpoints of the operation, across attempts. A record takes only a checkpoint with a
    /// higher one than it has, so an earlier checkpoint that a stalled store delivers late changes nothing.
    pub sequence: u32,
    /// What was reached, for example `charge_created`.
    pub name: Arc<str>,
    /// What the next attempt needs to continue from there.
    pub data: Bytes,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Checkpoint({}: {}, {} bytes)", self.sequence, self.name, self.data.len())
    }
}

/// The answer of an operation, kept byte for byte.
///
/// For HTTP these are the status, the kept header fields and the body. Operations without HTTP use the status to say
/// what kind of answer the body is. Cloning is cheap: nothing is copied.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// The HTTP status, or a code that the operation defines.
    pub status: u16,
    /// Header fields in their order, repeats included.
    pub headers: Arc<[HeaderField]>,
    /// The body.
    pub body: StoredBody,
    /// The trace of the request whose run gave this answer, if its [`Operation`](crate::engine::Operation::trace) named one. No part
    /// of the answer: repeats do not get it.
    pub trace: Option<TraceParent>,
}

/// A header field as bytes: names are lower-case ASCII, values are any bytes that HTTP allows.
#[derive(Clone, PartialEq, Eq)]
pub struct HeaderField {
    /// The field name.
    pub name: Bytes,
    /// The field value, not necessarily UTF-8.
    pub value: Bytes,
}

/// A stored body. Exhaustive on purpose: forgetting the tombstone would replay an empty body.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "forgetting the tombstone would replay an empty body")]
pub enum StoredBody {
    /// All of it.
    Retained(Bytes),
    /// The record is a tombstone: the operation ended, but its body was too large to keep, or was erased.
    NotRetained,
}

impl StoredResponse {
    /// A response with a body and no header fields.
    #[must_use]
    pub fn new(status: u16, body: impl Into<Bytes>) -> Self {
        Self { status, headers: Arc::from([]), body: StoredBody::Retained(body.into()), trace: None }
    }

    /// Whether clients cannot tell the two responses apart. The order of header fields with different names has no meaning
    /// (RFC 9110 section 5.3), and some frameworks do not keep it.
    pub(crate) fn is_equivalent_to(&self, other: &Self) -> bool {
        let by_name = |response: &Self| {
            let mut fields = response.headers.to_vec();
            fields.sort_by(|one, other| one.name.cmp(&other.name));
            fields
        };
        let is_same = (self.status, &self.body) == (other.status, &other.body);
        is_same && (self.headers == other.headers || by_name(self) == by_name(other))
    }

    /// The response of a record whose outcome is unknown: 504 without a body, because the operation gave no answer.
    #[must_use]
    pub fn outcome_unknown() -> Self {
        Self::new(504, Bytes::new())
    }
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "StoredResponse({}, {} header fields, {:?})", self.status, self.headers.len(), self.body)
    }
}

impl fmt::Debug for HeaderField {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: (redacted, {} bytes)", self.name.escape_ascii(), self.value.len())
    }
}

impl fmt::Debug for StoredBody {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retained(body) => write!(formatter, "{} bytes", body.len()),
            Self::NotRetained => formatter.write_str("body not retained"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_sizes_and_names_but_no_values() {
        let response = StoredResponse {
            status: 201,
            headers: Arc::from([HeaderField { name: "location".into(), value: "/secret".into() }]),
            body: StoredBody::Retained("secret".into()),
            trace: None,
        };
        assert_eq!(format!("{response:?}"), "StoredResponse(201, 1 header fields, 6 bytes)");
        assert_eq!(format!("{:?}", response.headers[0]), "location: (redacted, 7 bytes)");
        assert_eq!(format!("{:?}", StoredBody::NotRetained), "body not retained");
        let checkpoint = Checkpoint { sequence: 1, name: "charged".into(), data: "secret".into() };
        assert_eq!(format!("{checkpoint:?}"), "Checkpoint(1: charged, 6 bytes)");
    }

    #[test]
    fn it_runs_again_only_if_both_say_so_and_a_newcomer_that_can_find_out_does() {
        use Takeover::{Probe, Rerun, Unknown};
        assert_eq!(Rerun.met_by(Rerun), Rerun);
        for crashed in [Rerun, Unknown, Probe] {
            assert_eq!(crashed.met_by(Unknown), Unknown);
            assert_eq!(crashed.met_by(Probe), Probe);
        }
        assert_eq!([Unknown.met_by(Rerun), Probe.met_by(Rerun)], [Unknown, Unknown]);
    }

    #[test]
    fn each_change_gives_another_version_and_it_is_read_back() {
        let at = Timestamp::from_unix_micros;
        let state = |lease_until| State::InProgress {
            lease_until: at(lease_until),
            acquisition: Acquisition::Fresh,
            takeover: Takeover::Rerun,
        };
        let record = Record {
            fingerprint: Fingerprint::of_bytes("", b""),
            owner: OwnerToken::from_bytes([1; 16]),
            attempt: 1,
            checkpoint: None,
            created_at: at(1),
            updated_at: at(2),
            expires_at: at(9),
            state: state(5),
        };
        let response = StoredResponse::outcome_unknown;
        let checkpoint = Checkpoint { sequence: 1, name: "a".into(), data: Bytes::new() };
        let failed = |failure| State::Failed { failure, response: response() };
        let changed = [
            record.clone(),
            Record { owner: OwnerToken::from_bytes([2; 16]), ..record.clone() },
            Record { attempt: 2, ..record.clone() },
            Record { checkpoint: Some(checkpoint), ..record.clone() },
            Record { created_at: at(0), ..record.clone() },
            Record { updated_at: at(3), ..record.clone() },
            Record { expires_at: at(8), ..record.clone() },
            Record { state: state(6), ..record.clone() },
            Record { state: State::Completed { response: response() }, ..record.clone() },
            Record { state: failed(Failure::Terminal), ..record.clone() },
            Record { state: failed(Failure::OutcomeUnknown), ..record.clone() },
            Record { state: failed(Failure::Retryable { not_before: at(5) }), ..record.clone() },
            Record { state: failed(Failure::Retryable { not_before: at(6) }), ..record.clone() },
        ];
        let versions: std::collections::HashSet<_> = changed.iter().map(Record::version).collect();
        assert_eq!(versions.len(), changed.len());
        let version = record.version();
        assert_eq!(version.to_string().parse(), Ok(version));
        for text in ["", "0", &"g".repeat(32), &"A".repeat(32), &"0".repeat(33)] {
            assert_eq!(text.parse::<RecordVersion>(), Err(InvalidRecordVersion), "{text}");
        }
    }

    #[test]
    fn owner_tokens_are_random_and_survive_a_store() {
        let token = OwnerToken::random();
        assert_ne!(token, OwnerToken::random());
        assert_eq!(OwnerToken::from_bytes(*token.as_bytes()), token);
        assert_eq!(
            format!("{:?}", OwnerToken::from_bytes([0x11; 16])),
            "OwnerToken(11111111-1111-1111-1111-111111111111)"
        );
    }
}
