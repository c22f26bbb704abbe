//! Writes many verbs into one statement, and reads their outcomes from its rows.

use std::sync::Arc;

use idem_core::StoreError;
use idem_core::codec::FlatRecord;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};

use crate::batch::arguments::{self, Arguments, LiteralArguments, PreparedCall};
use crate::batch::kind::{ACQUIRE, CHECKPOINT, KINDS, LOOK, RELEASE, REMOVE, RENEW, REPLACE, SETTLE, kind};
use crate::batch::row::read_lookup;
use crate::batch::single::SingleStatements;
use crate::batch::verb::{ReplaceOutcome, Verb, VerbOutcome, unexpected_answer};
use crate::error::unreadable;
use crate::schema::name::Schema;
use crate::sql::Sql;

/// The functions that take many items at once, and how many arguments each has.
const FUNCTIONS: [(usize, &str, usize); 6] = [
    (RENEW, "idem_renew_v1", 5),
    (CHECKPOINT, "idem_checkpoint_v1", 5),
    (SETTLE, "idem_settle_v1", 9),
    (RELEASE, "idem_release_v1", 3),
    (ACQUIRE, "idem_acquire_v1", 13),
    (LOOK, "idem_lookup_v1", 3),
];

/// How the functions are called.
#[derive(Debug, Clone)]
pub(crate) struct FunctionCalls {
    schema: Schema,
    /// By kind: the call up to its arguments.
    openings: [String; KINDS],
    /// `None` through a transaction pooler, whose sessions do not keep prepared statements for one client.
    prepared: Option<Prepared>,
}

/// The statements that an exclusive session prepares.
#[derive(Debug, Clone)]
struct Prepared {
    /// By kind: the call with parameters.
    calls: [Arc<str>; KINDS],
    single: SingleStatements,
}

impl FunctionCalls {
    pub(crate) fn new(schema: &Schema, may_prepare: bool) -> Self {
        let mut openings: [String; KINDS] = Default::default();
        let mut calls: [Arc<str>; KINDS] = Default::default();
        for (kind, function, arguments) in FUNCTIONS {
            let opening = format!("SELECT {kind} AS kind, * FROM {}.{function}(", schema.quoted());
            let parameters = (1..=arguments).map(|number| format!("${number}")).collect::<Vec<_>>().join(",");
            calls[kind] = format!("{opening}{parameters})").into();
            openings[kind] = opening;
        }
        let prepared = may_prepare.then(|| Prepared { calls, single: SingleStatements::new(schema) });
        Self { schema: schema.clone(), openings, prepared }
    }
}

impl Prepared {
    /// The call that does `verbs`; `None` if they are of several kinds, or of one that is not prepared.
    fn call<'a>(
        &self,
        positions: &[Vec<usize>; KINDS],
        skew: i64,
        is_one_table: bool,
        mut verbs: impl Iterator<Item = &'a Verb> + Clone,
    ) -> Option<PreparedCall> {
        let all = verbs.clone();
        if let (Some(verb), None) = (verbs.next(), verbs.next())
            && let Some(call) = self.single.call(skew, verb, is_one_table)
        {
            return Some(call);
        }
        let of_kind = the_only(positions).filter(|&of_kind| !self.calls[of_kind].is_empty())?;
        let call = sqlx::query(AssertSqlSafe(Arc::clone(&self.calls[of_kind])));
        (!is_confirmed(all.clone())).then(|| with_arguments(of_kind, call, skew, all))
    }
}

/// The message for a batch.
pub(crate) enum Message {
    /// A transaction, as text.
    Text(String),
    /// A prepared call with binary arguments, which cost both ends less than text.
    Prepared(PreparedCall),
}

/// The verbs of a message.
pub(crate) struct Batch {
    /// By kind and item: the position of the verb.
    positions: [Vec<usize>; KINDS],
    unanswered: Vec<Option<VerbOutcome>>,
}

impl Batch {
    /// A transaction that does `verbs`, in one message. Without `begin` it is the implicit transaction of a message, with the
    /// settings of the session. `is_one_table`: no records were found in partitions.
    pub(crate) fn new<'a>(
        calls: &FunctionCalls,
        begin: Option<&str>,
        skew: i64,
        is_one_table: bool,
        verbs: impl Iterator<Item = &'a Verb> + Clone,
    ) -> (Message, Self) {
        let mut positions: [Vec<usize>; KINDS] = Default::default();
        let mut unanswered = Vec::new();
        for (position, verb) in verbs.clone().enumerate() {
            positions[kind(verb)].push(position);
            // The verbs of owners answer only the items that they applied to.
            unanswered.push(matches!(kind(verb), RENEW..=RELEASE).then_some(VerbOutcome::Applied(false)));
        }
        let prepared = match (begin, &calls.prepared) {
            (None, Some(prepared)) => prepared.call(&positions, skew, is_one_table, verbs.clone()),
            _ => None,
        };
        let message = match prepared {
            Some(call) => Message::Prepared(call),
            None => {
                let mut sql = Sql::default();
                sql.push(begin.unwrap_or_default());
                Statement { calls, skew, sql: &mut sql }.write(&positions, verbs);
                if begin.is_some() {
                    sql.push("COMMIT");
                }
                Message::Text(sql.into_text())
            }
        };
        (message, Self { positions, unanswered })
    }

    /// The outcome of each verb. If a row cannot be read, only its verb gets the error.
    pub(crate) fn answers(self, rows: &[PgRow]) -> Result<Vec<Result<VerbOutcome, StoreError>>, StoreError> {
        let Self { positions, unanswered } = self;
        let mut answers: Vec<_> = unanswered.into_iter().map(|answer| answer.ok_or_else(unexpected_answer)).collect();
        // The locks that come first have a row without columns.
        for row in rows.iter().filter(|row| !row.is_empty()) {
            let kind: i32 = row.try_get(0).map_err(unreadable)?;
            let item: i64 = row.try_get(1).map_err(unreadable)?;
            let kind = usize::try_from(kind).map_err(unreadable)?;
            let item = usize::try_from(item - 1).map_err(unreadable)?;
            let position =
                positions.get(kind).and_then(|items| items.get(item)).copied().ok_or_else(unexpected_answer)?;
            let answer = answers.get_mut(position).ok_or_else(unexpected_answer)?;
            *answer = match kind {
                ACQUIRE | LOOK => read_lookup(row, 2).map(VerbOutcome::Found),
                REPLACE | REMOVE => read_replaced(row).map(VerbOutcome::Replaced),
                _ => Ok(VerbOutcome::Applied(true)),
            };
        }
        Ok(answers)
    }
}

/// The kind of the verbs, if all have the same.
fn the_only(positions: &[Vec<usize>; KINDS]) -> Option<usize> {
    let mut kinds = positions.iter().enumerate().filter(|(_, items)| !items.is_empty()).map(|(kind, _)| kind);
    kinds.next().filter(|_| kinds.next().is_none())
}

fn is_confirmed<'a>(mut verbs: impl Iterator<Item = &'a Verb>) -> bool {
    verbs.any(|verb| matches!(verb, Verb::Lookup { confirmed: true, .. }))
}

fn read_replaced(row: &PgRow) -> Result<ReplaceOutcome, StoreError> {
    match row.try_get::<i32, _>(2).map_err(unreadable)? {
        1 => Ok(ReplaceOutcome::Done),
        2 => Ok(ReplaceOutcome::Changed),
        3 => Ok(ReplaceOutcome::Running),
        _ => Err(unexpected_answer()),
    }
}

/// Adds the arguments from `verbs` to a call of that kind's function.
fn with_arguments<'a, A: Arguments>(
    kind: usize,
    call: A,
    skew: i64,
    verbs: impl Iterator<Item = &'a Verb> + Clone,
) -> A {
    match kind {
        RENEW => arguments::renew(call, skew, verbs),
        CHECKPOINT => arguments::checkpoint(call, skew, verbs),
        SETTLE => arguments::settle(call, skew, verbs),
        RELEASE => arguments::release(call, skew, verbs),
        ACQUIRE => arguments::acquire(call, skew, verbs),
        LOOK => arguments::look(call, skew, verbs),
        _ => call,
    }
}

struct Statement<'a> {
    calls: &'a FunctionCalls,
    skew: i64,
    sql: &'a mut Sql,
}

impl Statement<'_> {
    fn write<'a>(&mut self, positions: &[Vec<usize>; KINDS], verbs: impl Iterator<Item = &'a Verb> + Clone) {
        self.lock(positions, verbs.clone());
        for (of_kind, items) in positions.iter().enumerate() {
            if items.is_empty() {
                continue;
            }
            match of_kind {
                REPLACE | REMOVE => self.replace(verbs.clone().filter(move |verb| kind(verb) == of_kind)),
                _ => self.call(of_kind, verbs.clone()),
            }
        }
        if is_confirmed(verbs) {
            // A commit waits for standbys only if its transaction has written to the write-ahead log. It then waits for all
            // that is before it in the log, and so for what was read. It has to be one transaction: after a failover, another
            // may be on another server.
            self.sql.push("SELECT WHERE CASE WHEN pg_catalog.current_setting('synchronous_standby_names') ");
            self.sql.push("OPERATOR(pg_catalog.=) '' THEN FALSE ELSE pg_catalog.pg_logical_emit_message(");
            self.sql.push("TRUE,'idem'::pg_catalog.text,''::pg_catalog.text) IS NULL END;");
        }
    }

    /// Locks all rows that are to change, if several calls change rows. Each call locks in the order of ids, but only one order
    /// across all calls prevents a deadlock.
    fn lock<'a>(&mut self, positions: &[Vec<usize>; KINDS], verbs: impl Iterator<Item = &'a Verb> + Clone) {
        let changing = positions[..ACQUIRE].iter().filter(|items| !items.is_empty()).count();
        let one_by_one = positions[REPLACE].len() + positions[REMOVE].len();
        if changing > 1 || one_by_one > 1 {
            self.sql.push("SELECT FROM ").push(self.calls.schema.quoted()).push(".idem_lock_v1(");
            self.sql.byte_strings(verbs.filter_map(Verb::changes).map(|id| Some(id.as_bytes().as_slice()))).push(");");
        }
    }

    fn call<'a>(&mut self, kind: usize, verbs: impl Iterator<Item = &'a Verb> + Clone) {
        self.sql.push(&self.calls.openings[kind]);
        with_arguments(kind, LiteralArguments { sql: self.sql, is_first: true }, self.skew, verbs);
        self.sql.push(");");
    }

    /// Writes the decisions of the state machine, one by one because they are rare.
    fn replace<'a>(&mut self, verbs: impl Iterator<Item = &'a Verb>) {
        let skew = self.skew;
        for (item, verb) in verbs.enumerate() {
            let sql = self.sql.push("SELECT ").number(kind(verb) as i32).push(",");
            sql.number(item as i64 + 1).push("::BIGINT,").push(self.calls.schema.quoted());
            match verb {
                Verb::Replace { id, lock, version, record } => {
                    sql.push(".idem_replace_v1(").number(skew).push(",").bytes(id.as_bytes()).push(",");
                    sql.optional_number(*lock).push(",").number(*version).push(",");
                    write_record(sql, record);
                    sql.push(",").number(purge_after(record)).push(");");
                }
                Verb::Remove { id, version } => {
                    sql.push(".idem_remove_v1(").bytes(id.as_bytes()).push(",").number(*version).push(");");
                }
                _ => {}
            }
        }
    }
}

fn write_record(sql: &mut Sql, record: &FlatRecord) {
    let small = |sql: &mut Sql, number: Option<i64>, kind: &str| {
        sql.optional_number(number).push(kind).push(",");
    };
    small(sql, Some(record.format), "::SMALLINT");
    small(sql, Some(record.fingerprint_algorithm), "");
    sql.bytes(&record.fingerprint).push(",").bytes(&record.owner).push(",").number(record.attempt).push(",");
    small(sql, Some(record.state), "::SMALLINT");
    small(sql, record.acquisition, "::SMALLINT");
    small(sql, record.takeover, "::SMALLINT");
    small(sql, record.lease_until, "");
    small(sql, record.not_before, "");
    sql.optional_bytes(record.checkpoint_name.as_ref().map(String::as_bytes)).push(",");
    sql.optional_bytes(record.checkpoint_data.as_deref()).push(",");
    small(sql, record.status, "");
    sql.optional_bytes(record.headers.as_deref()).push(",");
    sql.optional_bytes(record.body.as_deref()).push(",");
    sql.number(record.created_at).push(",").number(record.updated_at).push(",").number(record.expires_at);
}

/// When the purge first looks at a record: when it would expire if it were settled now. Most records are settled soon, and
/// the settlement then need not change this indexed column.
fn purge_after(record: &FlatRecord) -> i64 {
    match record.lease_until {
        Some(lease_until) => {
            let retention = record.expires_at.saturating_sub(lease_until);
            record.updated_at.saturating_add(retention).min(record.expires_at)
        }
        None => record.expires_at,
    }
}
