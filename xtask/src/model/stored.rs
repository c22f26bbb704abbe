//! A record as a hashable part of a model's state.

use std::hash::{Hash, Hasher};

use idem_core::{Failure, Record, State, StoredBody, StoredResponse};

/// A record with a hash.
///
/// The search takes situations with equal hashes for the same. Two times that no decision reads are left out, because they would
/// multiply equivalent situations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored(pub(super) Record);

impl Hash for Stored {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        // Destructured completely, so that a new field does not compile until it is handled.
        let Record { fingerprint, owner, attempt, checkpoint, created_at: _, updated_at: _, expires_at, state } =
            &self.0;
        (fingerprint.digest(), owner, attempt, expires_at).hash(hasher);
        checkpoint.as_ref().map(|checkpoint| (&checkpoint.name, &checkpoint.data)).hash(hasher);
        match state {
            State::InProgress { lease_until, acquisition, takeover } => {
                (0, lease_until, acquisition, takeover).hash(hasher);
            }
            State::Completed { response } => {
                1.hash(hasher);
                hash_response(response, hasher);
            }
            State::Failed { failure, response } => {
                match failure {
                    Failure::Terminal => 2.hash(hasher),
                    Failure::OutcomeUnknown => 3.hash(hasher),
                    Failure::Retryable { not_before } => (4, not_before).hash(hasher),
                }
                hash_response(response, hasher);
            }
        }
    }
}

fn hash_response(response: &StoredResponse, hasher: &mut impl Hasher) {
    let StoredResponse { status, headers, body, .. } = response;
    (status, headers.len()).hash(hasher);
    match body {
        StoredBody::Retained(body) => body.hash(hasher),
        StoredBody::NotRetained => 0.hash(hasher),
    }
}
