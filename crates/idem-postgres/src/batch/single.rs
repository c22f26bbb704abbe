//! Statements for a single verb, in an exclusive session.
//!
//! They do what the functions of the schema do with many verbs, for less of the server's time: no call, no arrays, and the
//! planner settings of the session. Rare verbs have no such statement. A comment in each names the function, for operators
//! who read the server's statements.

use std::sync::Arc;

use idem_core::codec::takeover_number;
use idem_core::{Acquire, RECORD_FORMAT, RecordId};
use sqlx::AssertSqlSafe;

use crate::batch::arguments::PreparedCall;
use crate::batch::kind::{ACQUIRE, LOOK, SETTLE};
use crate::batch::row::RECORD_COLUMNS;
use crate::batch::verb::{FlatSettlement, Verb};
use crate::schema::name::Schema;
use crate::sql::{micros, readable};

/// The statements, which prepared calls share.
#[derive(Debug, Clone)]
pub(crate) struct SingleStatements {
    acquire: Arc<str>,
    look: Arc<str>,
    settle: Arc<str>,
}

impl SingleStatements {
    pub(crate) fn new(schema: &Schema) -> Self {
        let localised = |text: String| Arc::from(schema.localise(&text));
        Self { acquire: localised(acquire()), look: localised(look()), settle: localised(settle()) }
    }

    /// The call for `verb`; `None` if there is no statement for it. Acquires have one only for records in one table.
    pub(crate) fn call(&self, skew: i64, verb: &Verb, is_one_table: bool) -> Option<PreparedCall> {
        let query = |text: &Arc<str>| sqlx::query(AssertSqlSafe(Arc::clone(text))).bind(skew);
        match verb {
            Verb::Acquire { request, lock } if is_one_table => Some(bind_acquire(query(&self.acquire), request, *lock)),
            Verb::Lookup { id, lock: None, confirmed: false } => Some(bind_id(query(&self.look), id)),
            Verb::Settle { id, owner, settlement } => {
                Some(bind_settlement(bind_id(query(&self.settle), id).bind(owner.as_bytes().as_slice()), settlement))
            }
            _ => None,
        }
    }
}

/// Like `idem_acquire_v1`, but not for records in partitions: there the function also takes a lock on the id. The server
/// refuses this statement there, because no index has unique ids; see [`is_of_partitions`](crate::error::is_of_partitions).
fn acquire() -> String {
    format!(
        "/* idem_acquire_v1 for one */ WITH known AS MATERIALIZED (
            SELECT given.at, found.*,
                CASE WHEN found.id IS NULL THEN pg_catalog.pg_try_advisory_xact_lock_shared($3) END AS is_free
            FROM (SELECT \"idem\".idem_now_v1($1) AS at OFFSET 0) AS given LEFT JOIN LATERAL (
                SELECT one.xmin AS version, one.* FROM \"idem\".idem_records AS one
                WHERE one.id OPERATOR(pg_catalog.=) $2 OFFSET 0
            ) AS found ON TRUE
        ),
        made AS (
            INSERT INTO \"idem\".idem_records (
                id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state,
                acquisition, takeover, lease_until, created_at, updated_at, expires_at, purge_after
            )
            SELECT
                $2, pg_catalog.convert_from($4, 'UTF8'), pg_catalog.convert_from($5, 'UTF8'),
                pg_catalog.convert_from($6, 'UTF8'), $7, $8, $9, $10, 1, 1, 1, $11,
                \"idem\".idem_later_v1(known.at, $12), known.at, known.at,
                \"idem\".idem_later_v1(\"idem\".idem_later_v1(known.at, $12), $13),
                \"idem\".idem_later_v1(known.at, $13)
            FROM known WHERE known.is_free
            ON CONFLICT (id) DO NOTHING
            RETURNING TRUE
        )
        SELECT {ACQUIRE} AS kind, 1::BIGINT AS item,
            CASE
                WHEN known.id IS NOT NULL THEN 2
                WHEN NOT known.is_free THEN 3
                WHEN EXISTS (SELECT FROM made) THEN 1
                ELSE 4
            END,
            known.at, {RECORD_COLUMNS}
        FROM known"
    )
}

fn bind_acquire(call: PreparedCall, request: &Acquire, lock: i64) -> PreparedCall {
    let Acquire { origin, fingerprint, term, .. } = request;
    bind_id(call, &request.id)
        .bind(lock)
        .bind(readable(&origin.namespace))
        .bind(origin.scope.principal().map(readable))
        .bind(readable(origin.scope.operation()))
        .bind(i64::from(RECORD_FORMAT))
        .bind(i64::from(fingerprint.algorithm().number()))
        .bind(fingerprint.digest().as_slice())
        .bind(request.owner.as_bytes().as_slice())
        .bind(takeover_number(request.takeover))
        .bind(micros(term.lease))
        .bind(micros(term.retention))
}

/// Like `idem_lookup_v1` without a lock.
fn look() -> String {
    format!(
        "/* idem_lookup_v1 for one */ SELECT {LOOK} AS kind, 1::BIGINT AS item,
            CASE WHEN known.id IS NULL THEN 4 ELSE 2 END, given.at, {RECORD_COLUMNS}
        FROM (SELECT \"idem\".idem_now_v1($1) AS at OFFSET 0) AS given LEFT JOIN LATERAL (
            SELECT one.xmin AS version, one.* FROM \"idem\".idem_records AS one
            WHERE one.id OPERATOR(pg_catalog.=) $2 OFFSET 0
        ) AS known ON TRUE"
    )
}

fn bind_id(call: PreparedCall, id: &RecordId) -> PreparedCall {
    call.bind(id.as_bytes().as_slice())
}

/// Like `idem_settle_v1`.
fn settle() -> String {
    format!(
        "/* idem_settle_v1 for one */ UPDATE \"idem\".idem_records AS known SET
            state = $4, acquisition = NULL, takeover = NULL, lease_until = NULL,
            not_before = \"idem\".idem_later_v1(given.at, $5),
            checkpoint_name = CASE WHEN $4 OPERATOR(pg_catalog.<>) 2 THEN known.checkpoint_name END,
            checkpoint_data = CASE WHEN $4 OPERATOR(pg_catalog.<>) 2 THEN known.checkpoint_data END,
            status = $6, headers = $7, body = $8, updated_at = given.at, expires_at = given.expires_at,
            purge_after = least(known.purge_after, given.expires_at)
        FROM (
            SELECT clock.at,
                \"idem\".idem_later_v1(\"idem\".idem_later_v1(clock.at, coalesce($5, 0)), $9) AS expires_at
            FROM (SELECT \"idem\".idem_now_v1($1) AS at OFFSET 0) AS clock OFFSET 0
        ) AS given
        WHERE known.id OPERATOR(pg_catalog.=) $2 AND known.owner OPERATOR(pg_catalog.=) $3
            AND known.state OPERATOR(pg_catalog.=) 1 AND given.at OPERATOR(pg_catalog.<) known.expires_at
        RETURNING {SETTLE} AS kind, 1::BIGINT AS item"
    )
}

fn bind_settlement(call: PreparedCall, settlement: &FlatSettlement) -> PreparedCall {
    call.bind(settlement.state)
        .bind(settlement.retry_after)
        .bind(settlement.status)
        .bind(settlement.headers.as_slice())
        .bind(settlement.body.as_deref())
        .bind(settlement.retention)
}
