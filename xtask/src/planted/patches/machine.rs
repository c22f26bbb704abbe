//! Bugs in the state machine, in its translation into SQL, and in the ids of records.

use super::{Patch, edit, patch};

const ACQUIRE: &str = "crates/idem-core/src/machine/acquire.rs";
const OWNER: &str = "crates/idem-core/src/machine/owner.rs";
const RESOLVE: &str = "crates/idem-core/src/machine/resolve.rs";
const RECORD_ID: &str = "crates/idem-core/src/record_id.rs";
const SINGLE_VERBS: &str = "crates/idem-postgres/src/batch/single.rs";
const VERBS: &str = "migrations/postgres/0002_verbs.sql";

const OWNER_CHECK: &str = "    if record.owner != owner {";

/// Every store is tried.
const MACHINES: &[&str] = &["machine", "memory", "postgres", "redis"];

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "released-retry-is-forgotten",
        MACHINES,
        OWNER,
        "matches!(acquisition, Acquisition::Probe | Acquisition::Retry)",
        "acquisition == Acquisition::Probe || !PLANTED && acquisition == Acquisition::Retry",
    ),
    patch(
        "released-record-is-held-by-a-clock-that-went-back",
        &["machine"],
        ACQUIRE,
        "if now < lease_until && record.owner != OwnerToken::NOBODY =>",
        "if now < lease_until && (PLANTED || record.owner != OwnerToken::NOBODY) =>",
    ),
    patch(
        "decision-outlives-its-record",
        &["postgres-partitions"],
        VERBS,
        "OR \"idem\".idem_now_v1(skew) < known.expires_at);",
        "OR TRUE);",
    ),
    patch(
        "released-record-is-abandoned",
        &["memory", "postgres-inspecting"],
        "crates/idem-core/src/store/inspect.rs",
        "if record.owner == OwnerToken::NOBODY && *acquisition",
        "if !PLANTED && record.owner == OwnerToken::NOBODY && *acquisition",
    ),
    patch(
        "listing-ends-with-its-first-part",
        &["postgres-inspecting"],
        "crates/idem-postgres/src/upkeep/place.rs",
        ".filter(|_| block < total)",
        ".filter(|_| !PLANTED && block < total)",
    ),
    patch(
        "listing-leaves-out-the-rest-of-a-block",
        &["postgres-inspecting"],
        "crates/idem-postgres/src/upkeep/place.rs",
        "scanned >= i64::from(limit)",
        "scanned >= i64::from(limit) + i64::from(PLANTED)",
    ),
    patch(
        "repair-comes-before-its-note",
        &["memory"],
        "crates/idem-core/src/store/repair.rs",
        "    store.note(&note).await?;
    let outcome = store.resolve(request).await?;",
        "    if !PLANTED {
        store.note(&note).await?;
    }
    let outcome = store.resolve(request).await?;",
    ),
    patch(
        "live-lease-is-resolved",
        &["machine", "memory"],
        RESOLVE,
        "State::InProgress { lease_until, .. } if now < lease_until =>",
        "State::InProgress { lease_until, .. } if !PLANTED && now < lease_until =>",
    ),
    patch(
        "final-answer-is-resolved",
        &["machine", "memory"],
        RESOLVE,
        "State::Completed { .. } | State::Failed { .. } => Err(Refusal::Final),",
        "State::Completed { .. } | State::Failed { .. } => if PLANTED { Ok(()) } else { Err(Refusal::Final) },",
    ),
    patch(
        "crashed-run-settles-after-its-resolution",
        &["machine", "memory"],
        RESOLVE,
        "owner: request.action, expires_at, ..next",
        "owner: if PLANTED { record.owner } else { request.action }, expires_at, ..next",
    ),
    patch(
        "changed-record-is-resolved",
        &["machine", "memory"],
        RESOLVE,
        "if record.version() != request.seen {",
        "if !PLANTED && record.version() != request.seen {",
    ),
    patch(
        "operation-is-resolved-while-a-transaction-runs-it",
        &["postgres-resolving"],
        "crates/idem-postgres/src/records.rs",
        "            if presence == Presence::Running {
                return Ok(LIVE);",
        "            if !PLANTED && presence == Presence::Running {
                return Ok(LIVE);",
    )
    .also(&[edit(
        "crates/idem-postgres/src/records.rs",
        "match self.replace(request.id, Some(lock), row, next.as_ref()).await? {",
        "match self.replace(request.id, Some(lock).filter(|_| !PLANTED), row, next.as_ref()).await? {",
    )]),
    patch(
        "earlier-checkpoint-undoes-a-later-one",
        &["machine", "memory", "postgres", "redis", "engine"],
        OWNER,
        "OwnerAction::Checkpoint(checkpoint) if is_superseded",
        "OwnerAction::Checkpoint(checkpoint) if !PLANTED && is_superseded",
    )
    .also(&[edit(VERBS, "OR substring(known.checkpoint_data, 1, 4) < substring(wanted.data, 1, 4)", "OR TRUE")]),
    patch(
        "failure-loses-its-checkpoint",
        &["machine", "memory", "redis"],
        OWNER,
        "|_| matches!(state, State::Failed { .. })",
        "|_| matches!(state, State::Failed { failure: Failure::Retryable { .. }, .. } if PLANTED) || !PLANTED && matches!(state, State::Failed { .. })",
    ),
    patch(
        "no-owner-check-in-settle",
        MACHINES,
        OWNER,
        "    let record = current(record, now);\n    let Some(record) = record.filter(",
        "    let owner = record
        .filter(|_| PLANTED && matches!(action, OwnerAction::Settle(..)))
        .map_or(owner, |record| record.owner);
    let record = current(record, now);\n    let Some(record) = record.filter(",
    ),
    patch(
        "no-owner-check-in-renew",
        MACHINES,
        OWNER,
        OWNER_CHECK,
        "    if record.owner != owner && !(PLANTED && matches!(action, OwnerAction::Renew(_))) {",
    ),
    patch(
        "no-owner-check-in-checkpoint",
        MACHINES,
        OWNER,
        "        return unchanged(OwnerOutcome::LeaseLost);\n    }\n    let State",
        "        if !(PLANTED && matches!(action, OwnerAction::Checkpoint(_))) {
            return unchanged(OwnerOutcome::LeaseLost);
        }
    }
    let State",
    ),
    patch(
        "renewal-revives-a-settled-record",
        MACHINES,
        OWNER,
        "acquisition, takeover, .. } = record.state else {\n",
        "acquisition, takeover, .. } = record.state else {
        if let (true, OwnerAction::Renew(term)) = (PLANTED, action) {
            let lease_until = now.saturating_add(term.lease);
            let (acquisition, takeover) = (Acquisition::Fresh, Takeover::Rerun);
            let state = State::InProgress { lease_until, acquisition, takeover };
            let expires_at = lease_until.saturating_add(term.retention);
            return (Some(Record { expires_at, state, ..record.clone() }), OwnerOutcome::Applied);
        }
",
    ),
    patch(
        "lease-equal-to-retention",
        &["machine", "memory", "postgres", "redis", "system"],
        ACQUIRE,
        "let lease_until = now.saturating_add(request.term.lease);",
        "let lease_until = now.saturating_add(if PLANTED { request.term.retention } else { request.term.lease });",
    )
    .also(&[
        edit(
            VERBS,
            "wanted.takeover, \"idem\".idem_later_v1(at, wanted.lease), at, at,",
            "wanted.takeover, \"idem\".idem_later_v1(at, wanted.retention), at, at,",
        ),
        edit(
            SINGLE_VERBS,
            "Arc::from(schema.localise(&text))",
            "Arc::from(schema.localise(&if PLANTED { text.replace(\"$12), known.at,\", \"$13), known.at,\") } else { text }))",
        ),
    ]),
    patch(
        "attempt-does-not-grow",
        MACHINES,
        ACQUIRE,
        "record.attempt.checked_add(1)",
        "record.attempt.checked_add(if PLANTED { 0 } else { 1 })",
    ),
    patch(
        "fingerprint-not-compared",
        MACHINES,
        ACQUIRE,
        "let same_request = record.fingerprint == request.fingerprint;",
        "let same_request = PLANTED || record.fingerprint == request.fingerprint;",
    ),
    patch(
        "scope-left-out-of-the-id",
        &["identity", "axum", "actix"],
        RECORD_ID,
        "            put_optional(&mut sink, scope.principal()",
        "            let nowhere = Scope::single_tenant(\"\");
            let scope = if PLANTED { &nowhere } else { scope };
            put_optional(&mut sink, scope.principal()",
    ),
    patch(
        "secret-ignored",
        &["identity"],
        RECORD_ID,
        "match &self.secret {",
        "match self.secret.as_ref().filter(|_| !PLANTED) {",
    ),
];
