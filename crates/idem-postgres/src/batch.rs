//! Many verbs in one statement, and their answers out of its rows.

use std::sync::Arc;

use idem_core::codec::FlatRecord;
use idem_core::{StoreError, planted};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};

use crate::arguments::{self, Arguments, Call, Written};
use crate::error::unreadable;
use crate::literal::Sql;
use crate::row::seen;
use crate::schema::Schema;
use crate::verb::{Answer, Placed, Verb, misanswered};

/// The kinds of verbs, in the order in which a statement does them.
///
/// Those that read a row come last: a row's version is the transaction that wrote it, so nothing in the same transaction
/// may change a row after its version was read.
const RENEW: usize = 0;
const CHECKPOINT: usize = 1;
const SETTLE: usize = 2;
const RELEASE: usize = 3;
const REPLACE: usize = 4;
const REMOVE: usize = 5;
const ACQUIRE: usize = 6;
const LOOK: usize = 7;
const KINDS: usize = 8;

fn kind(verb: &Verb) -> usize {
    match verb {
        Verb::Acquire { .. } => ACQUIRE,
        Verb::Look { .. } => LOOK,
        Verb::Renew { .. } => RENEW,
        Verb::Checkpoint { .. } => CHECKPOINT,
        Verb::Settle { .. } => SETTLE,
        Verb::Release { .. } => RELEASE,
        Verb::Replace { .. } => REPLACE,
        Verb::Remove { .. } => REMOVE,
    }
}

/// The functions that take many items at once, and how many arguments each has.
const FUNCTIONS: [(usize, &str, usize); 6] = [
    (RENEW, "idem_renew_v1", 5),
    (CHECKPOINT, "idem_checkpoint_v1", 5),
    (SETTLE, "idem_settle_v1", 9),
    (RELEASE, "idem_release_v1", 3),
    (ACQUIRE, "idem_acquire_v1", 13),
    (LOOK, "idem_look_v1", 3),
];

/// How the functions are called.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    schema: Schema,
    /// By kind: what stands before the arguments.
    openings: [String; KINDS],
    /// By kind: the call with its arguments apart. `None` where sessions are given to somebody else next, who would be asked
    /// to do what this one has prepared.
    prepared: Option<[Arc<str>; KINDS]>,
}

impl Calls {
    pub(crate) fn new(schema: &Schema, may_prepare: bool) -> Self {
        let mut openings: [String; KINDS] = Default::default();
        let mut prepared: [Arc<str>; KINDS] = Default::default();
        for (kind, function, arguments) in FUNCTIONS {
            let opening = format!("SELECT {kind} AS kind, * FROM {}.{function}(", schema.quoted());
            let places = (1..=arguments).map(|place| format!("${place}")).collect::<Vec<_>>().join(",");
            prepared[kind] = format!("{opening}{places})").into();
            openings[kind] = opening;
        }
        Self { schema: schema.clone(), openings, prepared: may_prepare.then_some(prepared) }
    }
}

/// What is sent for a number of verbs.
pub(crate) enum Message {
    /// A transaction, as text.
    Text(String),
    /// A call that the session prepares when it first sees it, with its arguments as they are: to write them as text and
    /// to read that takes both ends longer.
    Prepared(Call),
}

/// What a message asks for.
pub(crate) struct Batch {
    /// By kind and item: which verb it is.
    places: [Vec<usize>; KINDS],
    unanswered: Vec<Option<Answer>>,
}

impl Batch {
    /// A transaction that does `verbs`, all in one message. Without `begin` it is the one that a message is by itself, with
    /// the settings of the session.
    pub(crate) fn new<'a>(
        calls: &Calls,
        begin: Option<&str>,
        skew: i64,
        verbs: impl Iterator<Item = &'a Verb> + Clone,
    ) -> (Message, Self) {
        let mut places: [Vec<usize>; KINDS] = Default::default();
        let mut unanswered = Vec::new();
        for (place, verb) in verbs.clone().enumerate() {
            places[kind(verb)].push(place);
            // The verbs of owners answer only the items that they applied to.
            unanswered.push(matches!(kind(verb), RENEW..=RELEASE).then_some(Answer::Applied(false)));
        }
        let message = match (begin, &calls.prepared, the_only(&places)) {
            (None, Some(prepared), Some(of_kind)) if !prepared[of_kind].is_empty() && !is_confirmed(verbs.clone()) => {
                let call = sqlx::query(AssertSqlSafe(Arc::clone(&prepared[of_kind])));
                Message::Prepared(with_arguments(of_kind, call, skew, verbs))
            }
            _ => {
                let mut sql = Sql::default();
                sql.push(begin.unwrap_or_default());
                Statement { calls, skew, sql: &mut sql }.write(&places, verbs);
                if begin.is_some() {
                    sql.push("COMMIT");
                }
                Message::Text(sql.into_text())
            }
        };
        (message, Self { places, unanswered })
    }

    /// The answer to each verb. One whose row cannot be read has an error of its own.
    pub(crate) fn answers(self, rows: &[PgRow]) -> Result<Vec<Result<Answer, StoreError>>, StoreError> {
        let Self { places, unanswered } = self;
        let mut answers: Vec<_> = unanswered.into_iter().map(|answer| answer.ok_or_else(misanswered)).collect();
        // The locks that come first have a row without columns.
        for row in rows.iter().filter(|row| !row.is_empty()) {
            let kind: i32 = row.try_get(0).map_err(unreadable)?;
            let item: i64 = row.try_get(1).map_err(unreadable)?;
            let kind = usize::try_from(kind).map_err(unreadable)?;
            let item = usize::try_from(item - 1).map_err(unreadable)?;
            let place = places.get(kind).and_then(|items| items.get(item)).copied().ok_or_else(misanswered)?;
            let answer = answers.get_mut(place).ok_or_else(misanswered)?;
            *answer = match kind {
                ACQUIRE | LOOK => seen(row, 2).map(Answer::Seen),
                REPLACE | REMOVE => placed(row).map(Answer::Placed),
                _ => Ok(Answer::Applied(true)),
            };
        }
        Ok(answers)
    }
}

/// The kind of all verbs, if it is one.
fn the_only(places: &[Vec<usize>; KINDS]) -> Option<usize> {
    let mut kinds = places.iter().enumerate().filter(|(_, items)| !items.is_empty()).map(|(kind, _)| kind);
    kinds.next().filter(|_| kinds.next().is_none())
}

fn is_confirmed<'a>(mut verbs: impl Iterator<Item = &'a Verb>) -> bool {
    verbs.any(|verb| matches!(verb, Verb::Look { confirmed: true, .. }))
}

fn placed(row: &PgRow) -> Result<Placed, StoreError> {
    match row.try_get::<i32, _>(2).map_err(unreadable)? {
        1 => Ok(Placed::Done),
        2 => Ok(Placed::Changed),
        3 => Ok(Placed::Held),
        _ => Err(misanswered()),
    }
}

/// A call of the function of that kind, with what is in `verbs` for it.
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
    calls: &'a Calls,
    skew: i64,
    sql: &'a mut Sql,
}

impl Statement<'_> {
    fn write<'a>(&mut self, places: &[Vec<usize>; KINDS], verbs: impl Iterator<Item = &'a Verb> + Clone) {
        self.lock(places, verbs.clone());
        for (of_kind, items) in places.iter().enumerate() {
            if items.is_empty() {
                continue;
            }
            match of_kind {
                REPLACE | REMOVE => self.place(verbs.clone().filter(move |verb| kind(verb) == of_kind)),
                _ => self.call(of_kind, verbs.clone()),
            }
        }
        if is_confirmed(verbs) && !planted!("unconfirmed-look") {
            // A commit waits for standbys only if its transaction has written to the log; then for all that is before it
            // there, and so for what was seen. It has to be one transaction: after a failover, another may be on another
            // server.
            self.sql.push("SELECT WHERE CASE current_setting('synchronous_standby_names') WHEN '' THEN FALSE ELSE ");
            self.sql.push("pg_logical_emit_message(TRUE,'idem'::TEXT,''::TEXT) IS NULL END;");
        }
    }

    /// Locks the rows that are to change, when several functions change some each: each of them keeps to the order of ids,
    /// but only all of them together keep others from waiting in a circle.
    fn lock<'a>(&mut self, places: &[Vec<usize>; KINDS], verbs: impl Iterator<Item = &'a Verb> + Clone) {
        let changing = places[..ACQUIRE].iter().filter(|items| !items.is_empty()).count();
        let one_by_one = places[REPLACE].len() + places[REMOVE].len();
        if changing > 1 || one_by_one > 1 {
            self.sql.push("SELECT FROM ").push(self.calls.schema.quoted()).push(".idem_lock_v1(");
            self.sql.byte_strings(verbs.filter_map(Verb::changes).map(|id| Some(id.as_bytes().as_slice()))).push(");");
        }
    }

    fn call<'a>(&mut self, kind: usize, verbs: impl Iterator<Item = &'a Verb> + Clone) {
        self.sql.push(&self.calls.openings[kind]);
        with_arguments(kind, Written { sql: self.sql, is_first: true }, self.skew, verbs);
        self.sql.push(");");
    }

    /// Decisions of the state machine, one by one: they are rare.
    fn place<'a>(&mut self, verbs: impl Iterator<Item = &'a Verb>) {
        for (item, verb) in verbs.enumerate() {
            let sql = self.sql.push("SELECT ").number(kind(verb) as i32).push(",");
            sql.number(item as i64 + 1).push("::BIGINT,").push(self.calls.schema.quoted());
            match verb {
                Verb::Replace { id, lock, version, record } => {
                    sql.push(".idem_replace_v1(").bytes(id.as_bytes()).push(",").optional_number(*lock).push(",");
                    sql.number(*version).push(",");
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

/// When the purge looks at a record first: when it would expire if it were settled at once, since most are settled soon
/// and the settlement shall not have to change this.
fn purge_after(record: &FlatRecord) -> i64 {
    match record.lease_until {
        Some(lease_until) => {
            let retention = record.expires_at.saturating_sub(lease_until);
            record.updated_at.saturating_add(retention).min(record.expires_at)
        }
        None => record.expires_at,
    }
}
