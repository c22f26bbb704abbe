//! A record as a part of a model's state, which has to be hashable.

use std::hash::{Hash, Hasher};

use idem_core::{Failure, Record, State, StoredBody, StoredResponse};

/// A record that can be hashed.
///
/// Situations with equal hashes count as one. The two times that no decision looks at are left out, because they would
/// make many of what is one situation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored(pub(super) Record);

impl Hash for Stored {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        // Taken apart completely, so that a new field does not compile before it is hashed.
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
    let StoredResponse { status, headers, body } = response;
    (status, headers.len()).hash(hasher);
    match body {
        StoredBody::Retained(body) => body.hash(hasher),
        StoredBody::NotRetained => 0.hash(hasher),
    }
}
