//! The statements that begin and end a handler's transaction.

use std::sync::OnceLock;

use idem_core::RecordId;

use crate::batch::row::RECORD_COLUMNS;
use crate::config::{Isolation, PostgresConfig};
use crate::connect::options::transaction_settings;
use crate::connect::server::Server;
use crate::schema::name::{IdentifiedSchema, Schema};
use crate::sql::{Echo, Sql, milliseconds, random_number, set_for_transaction};

/// The statements and settings of handlers' transactions.
#[derive(Debug)]
pub(crate) struct TransactionSettings {
    /// The BEGIN statement. In a session of the application's pool sqlx sends it, so that sqlx counts the transaction.
    pub(crate) begin: String,
    /// Whether the session is of a pool of the application, whose role and user the lock statement then answers.
    pub(crate) is_from_pool: bool,
    /// Whether sessions keep the next four statements prepared.
    pub(crate) is_prepared: bool,
    lock: StoreStatement,
    /// Whether there is a record. For first runs, which most are, that costs the server less than a query for all columns.
    look: StoreStatement,
    wait: StoreStatement,
    /// Inserts a record without a checkpoint and without a time of the next attempt. Most records have neither, and the server
    /// takes about 7,000 instructions for an argument.
    insert: StoreStatement,
    /// Inserts any record. Never prepared.
    insert_any: StoreStatement,
    replace: StoreStatement,
    /// Reads the record.
    read: StoreStatement,
    /// The lock and the lookup for a transaction that the caller opened, where no setting may change.
    join_lock: StoreStatement,
    join_read: StoreStatement,
    look_settings: String,
    read_settings: String,
    clear_mark: String,
    lock_table: String,
    /// The name of the savepoint before the handler's writes. It is random, so that no handler uses it by chance. [`Mark`]
    /// detects a handler that has read it in `pg_stat_activity`. All transactions of this store use the same name, because
    /// `pg_stat_statements` keeps an entry for each.
    pub(crate) savepoint: String,
    pub(crate) max_transactions: u32,
    /// Whether a session takes no writes outside of the transaction.
    pub(crate) is_guarded: bool,
    /// How long a statement of the store waits for a row that another session has locked, in milliseconds.
    pub(crate) lock_timeout: i64,
    /// Whether all statements of a transaction see one snapshot.
    pub(crate) has_one_snapshot: bool,
}

/// The random value of the setting `idem.mark` before the store's savepoint; after it the setting is empty. `ROLLBACK TO` the
/// store's savepoint restores the value. `ROLLBACK TO` a savepoint that the handler made with the same name does not.
///
/// The statement that empties the setting is the same in all transactions, because `pg_stat_statements` keeps an entry for each
/// text of a SET.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(i64);

impl Mark {
    pub(crate) fn random() -> Self {
        Self(random_number())
    }

    /// A statement that fails with the state of [`is_shadowed`](crate::error::is_shadowed) unless the setting has this value.
    pub(crate) fn expect(self, schema: &Schema) -> String {
        schema.localise(&format!("SELECT \"idem\".idem_expect_v1('{}');", self.0))
    }
}

/// How the setting `idem.joined` lists the lock of an operation that the transaction runs: between commas.
fn joined(lock: i64) -> String {
    format!(",{lock},")
}

impl TransactionSettings {
    pub(crate) fn new(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        let begin = format!(
            "BEGIN ISOLATION LEVEL {}{} NOT DEFERRABLE;",
            config.isolation.sql(),
            if config.pooled { "" } else { " READ WRITE" },
        );
        let read = StoreStatement::read(schema);
        let wait = milliseconds(config.lock_timeout);
        let wait_in_lookup = format!("SET LOCAL lock_timeout={wait};");
        // Statements that sqlx has prepared in a pool of the application stay: it expects to find them.
        let unprepare =
            if config.pooled && !config.is_from_pool() { "SELECT \"idem\".idem_unprepare_v1();" } else { "" };
        Self {
            begin,
            is_from_pool: config.is_from_pool(),
            is_prepared: config.has_own_sessions(),
            lock: StoreStatement::lock(config, schema, server),
            look: StoreStatement::look(schema),
            wait: StoreStatement::wait(wait),
            insert: StoreStatement::insert(schema, ["NULL::BIGINT", "NULL", "NULL"]),
            insert_any: StoreStatement::insert(schema, ["$19", "$20", "$21"]),
            replace: StoreStatement::replace(schema),
            join_lock: StoreStatement::join_lock(config, schema),
            join_read: read.join(schema),
            read,
            // EXECUTE takes its snapshot before it waits for the table. The rows of a table that another session makes anew, as a
            // migration to partitions does, would not be in it. So the table is locked first. A statement that is not prepared
            // takes its snapshot after the wait.
            //
            // A plan is kept, and must use the index even if it is made while the table is nearly empty.
            look_settings: schema.localise(&format!(
                "{wait_in_lookup}LOCK TABLE \"idem\".idem_records IN ACCESS SHARE MODE;SET LOCAL enable_seqscan=off;"
            )),
            // A sequential scan would lock the whole table against serializable transactions.
            read_settings: format!("{wait_in_lookup}SET LOCAL enable_seqscan=off;SET LOCAL bytea_output=hex;"),
            clear_mark: schema.localise(&format!("SET LOCAL idem.mark='';{unprepare}")),
            lock_table: schema.localise("LOCK TABLE \"idem\".idem_records IN ROW EXCLUSIVE MODE;"),
            savepoint: format!("idem_{:016x}", random_number()),
            max_transactions: config.max_transactions.get(),
            is_guarded: !config.pooled,
            lock_timeout: wait,
            has_one_snapshot: config.isolation != Isolation::ReadCommitted,
        }
    }

    /// The SQL that prepares these statements in an exclusive session.
    pub(crate) fn prepare(&self) -> String {
        [&self.lock, &self.look, &self.wait, &self.insert].map(StoreStatement::prepare).concat()
    }

    /// The message that begins a transaction, tries to lock an operation, and looks whether there is a record.
    pub(crate) fn sql(&self, lock: i64, id: &RecordId, mark: Mark) -> String {
        let mut sql = Sql::default();
        if !self.is_from_pool {
            sql.push(&self.begin);
        }
        // A separate statement: the next one sees what the previous holder of the lock has committed.
        self.write(&mut sql, &self.lock, &[Argument::Number(Some(lock)), Argument::Number(Some(mark.0))]);
        sql.push("SAVEPOINT ").push(&self.savepoint).push(";").push(&self.look_settings);
        self.write(&mut sql, &self.look, &[Argument::Bytes(Some(id.as_bytes()))]);
        self.undo_settings(&mut sql);
        sql.into_text()
    }

    /// The message that reads the record, after that of [`sql`](Self::sql) has found that there is one.
    pub(crate) fn read_sql(&self, id: &RecordId, skew: i64) -> String {
        let mut sql = Sql::default();
        sql.push(&self.read_settings);
        self.read.write_text(&mut sql, &[Argument::Number(Some(skew)), Argument::Bytes(Some(id.as_bytes()))]);
        self.undo_settings(&mut sql);
        sql.into_text()
    }

    /// Undoes the settings of a lookup, which are not the handler's, and the lock on the table. If that were kept while the
    /// handler runs, no other session could drop a partition. Then removes the mark.
    fn undo_settings(&self, sql: &mut Sql) {
        sql.push("ROLLBACK TO SAVEPOINT ").push(&self.savepoint).push(";").push(&self.clear_mark);
    }

    /// Writes one of the statements that sessions keep prepared.
    fn write(&self, sql: &mut Sql, statement: &StoreStatement, arguments: &[Argument<'_>]) {
        if self.is_prepared {
            statement.write_call(sql, arguments);
        } else {
            statement.write_text(sql, arguments);
        }
    }

    /// Adds the statements that insert a settled record, where there is none. The row of the last one ends with an echo.
    pub(crate) fn insert(&self, sql: &mut Sql, on: Connection, arguments: &RecordArguments<'_>) {
        let write = |sql: &mut Sql, statement: &StoreStatement, arguments: &[Argument<'_>]| match on {
            Connection::Store => self.write(sql, statement, arguments),
            Connection::Caller => statement.write_text(sql, arguments),
        };
        write(sql, &self.wait, &[]);
        // As in idem_acquire_v1. The insert would also choose a partition before it waits for a session that makes another one
        // for the same time.
        sql.push(&self.lock_table);
        let (most, rest) = arguments.split_at(WITHOUT_REST);
        if rest.iter().all(Argument::is_null) {
            write(sql, &self.insert, most);
        } else {
            self.insert_any.write_text(sql, arguments);
        }
    }

    /// Adds the statement that replaces the record of an earlier attempt. Its row ends with an echo.
    pub(crate) fn replace(&self, sql: &mut Sql, version: i64, arguments: RecordArguments<'_>) {
        let more = [version, self.lock_timeout].map(|number| Argument::Number(Some(number)));
        let arguments: Vec<_> = arguments.into_iter().chain(more).collect();
        self.replace.write_text(sql, &arguments);
    }

    /// The message that tries to lock an operation in the caller's transaction, and looks up its record. Without a
    /// transaction, SAVEPOINT fails. A rollback to the first savepoint undoes everything, the lock too.
    pub(crate) fn join_sql(&self, lock: i64, id: &RecordId, skew: i64) -> String {
        let [join, look_only] = [Self::join_savepoint(), &format!("{}_look", self.savepoint)];
        let mut sql = Sql::default();
        sql.push("SAVEPOINT ").push(join).push(";");
        self.join_lock.write_text(&mut sql, &[Argument::Number(Some(lock)), Argument::Digits(&joined(lock))]);
        sql.push("SAVEPOINT ").push(look_only).push(";").push(&self.read_settings);
        self.join_read.write_text(&mut sql, &[Argument::Number(Some(skew)), Argument::Bytes(Some(id.as_bytes()))]);
        sql.push("ROLLBACK TO SAVEPOINT ").push(look_only).push(";RELEASE SAVEPOINT ").push(look_only);
        sql.into_text()
    }

    /// The name of the savepoint that a join makes first. It is not the one of the store's transactions, which may be joined too.
    ///
    /// All stores of a process use one name. If a transaction joins several operations, each settlement then releases the last
    /// savepoint, so that they may be settled in any order.
    pub(crate) fn join_savepoint() -> &'static str {
        static NAME: OnceLock<String> = OnceLock::new();
        NAME.get_or_init(|| format!("idem_join_{:016x}", random_number()))
    }

    /// A statement that fails with the state [`NOT_JOINED`](crate::error::is_not_joined), unless the transaction has joined
    /// the operation of `lock`. A rollback to before the join undoes the setting as well.
    pub(crate) fn expect_joined(lock: i64) -> String {
        format!(
            "SELECT CASE WHEN pg_catalog.strpos(pg_catalog.current_setting('idem.joined', TRUE), '{}') \
             OPERATOR(pg_catalog.>) 0 THEN '' ELSE pg_catalog.current_setting('idem.not_joined') END;",
            joined(lock)
        )
    }
}

/// The connection that a statement is for. A session of the store keeps statements prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connection {
    Store,
    Caller,
}

/// An argument of a [`StoreStatement`]. Its literal has numbers and hexadecimal digits only, and a cast where nothing else tells its type,
/// so that no value can be mistaken for SQL.
pub(crate) enum Argument<'a> {
    Number(Option<i64>),
    Bytes(Option<&'a [u8]>),
    Digits(&'a str),
    Echo(Echo),
}

impl Argument<'_> {
    fn is_null(&self) -> bool {
        matches!(self, Self::Number(None) | Self::Bytes(None))
    }

    /// Writes it for a parameter of a prepared statement, which has a type. With casts, and with numbers that are not quoted, the
    /// server needs a tenth more instructions for a transaction.
    fn write_untyped(&self, sql: &mut Sql) {
        match self {
            Self::Number(Some(number)) => sql.push("'").number(*number).push("'"),
            Self::Bytes(Some(bytes)) => sql.untyped_bytes(bytes),
            Self::Number(None) | Self::Bytes(None) => sql.push("NULL"),
            Self::Digits(text) => sql.push("'").push(text).push("'"),
            Self::Echo(echo) => sql.push("'").number(echo.number()).push("'"),
        };
    }

    fn write(&self, sql: &mut Sql) {
        match self {
            Self::Number(number) => sql.optional_number(*number),
            Self::Bytes(bytes) => sql.optional_bytes(*bytes),
            Self::Digits(text) => sql.push("'").push(text).push("'"),
            Self::Echo(echo) => sql.push(&echo.sql()),
        };
    }
}

/// The arguments for a settled record; see [`StoreStatement::insert`].
pub(crate) type RecordArguments<'a> = [Argument<'a>; 21];

/// The number of arguments before those that are NULL in most records.
const WITHOUT_REST: usize = 18;

/// Restores the `lock_timeout` that the handler or the application has set, after [`wait_at_most`].
const RESTORE_WAIT: &str =
    "pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('idem.lock_timeout'), TRUE)";

/// An expression that sets the `lock_timeout` to `limit` milliseconds, until [`RESTORE_WAIT`].
fn wait_at_most(limit: i64) -> String {
    format!(
        "(pg_catalog.set_config('idem.lock_timeout', pg_catalog.current_setting('lock_timeout'), TRUE) \
         OPERATOR(pg_catalog.||) pg_catalog.set_config('lock_timeout', '{limit}', TRUE))"
    )
}

/// A statement of the store inside a transaction. An exclusive session keeps it prepared, because parsing and planning cost
/// the server more than running it.
#[derive(Debug, Clone)]
struct StoreStatement {
    name: &'static str,
    types: &'static str,
    /// With `$1` and so on where the arguments belong.
    text: String,
}

impl StoreStatement {
    /// Tries to lock the operation.
    fn lock(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        // In every transaction, because an earlier handler may have set something else, and no transaction may keep its key
        // for ever.
        let settings = set_for_transaction(transaction_settings(config, server));
        let try_lock = Self::try_lock(config);
        // A session of a pool may have a role that the application gave it.
        let role = ", pg_catalog.current_setting('session_authorization'), pg_catalog.current_setting('role')";
        let role = if config.is_from_pool() { role } else { "" };
        // Few columns, because each takes the server about as many instructions as one more setting.
        let text = format!(
            "SELECT {try_lock}, \
             CASE WHEN {settings} OPERATOR(pg_catalog.||) pg_catalog.set_config('idem.mark', $2::pg_catalog.text, TRUE) \
             OPERATOR(pg_catalog.||) pg_catalog.set_config('idem.joined', pg_catalog.concat(',', $1, ','), TRUE) IS NOT NULL \
             THEN pg_catalog.current_setting('default_transaction_read_only') END{role}"
        );
        Self { name: "idem_lock", types: "(BIGINT, BIGINT)", text: schema.localise(&text) }
    }

    /// The server's time, and whether there is a record. The second is NULL if the server's configuration turns
    /// `default_transaction_read_only` on.
    fn look(schema: &Schema) -> Self {
        let text = "SELECT \"idem\".idem_now_v1(0), \
             CASE WHEN pg_catalog.set_config('default_transaction_read_only', NULL, TRUE) OPERATOR(pg_catalog.=) 'off' \
             THEN EXISTS (SELECT FROM \"idem\".idem_records AS one WHERE one.id OPERATOR(pg_catalog.=) $1) END";
        Self { name: "idem_look", types: "(pg_catalog.bytea)", text: schema.localise(text) }
    }

    /// Reads the record. It is never prepared, so its plan fits the table as it is.
    fn read(schema: &Schema) -> Self {
        // OFFSET 0 keeps the parts apart: the time is read once.
        let text = format!(
            "SELECT NULL, CASE WHEN known.id IS NULL THEN 4 ELSE 2 END, given.at, {RECORD_COLUMNS} FROM (
                SELECT \"idem\".idem_now_v1($1) AS at OFFSET 0
            ) AS given LEFT JOIN LATERAL (
                SELECT one.xmin AS version, one.* FROM \"idem\".idem_records AS one
                WHERE one.id OPERATOR(pg_catalog.=) $2 OFFSET 0
            ) AS known ON TRUE"
        );
        Self { name: "", types: "", text: schema.localise(&text) }
    }

    /// Limits the wait for the locks of [`insert`](Self::insert) to `limit` milliseconds. A separate statement, because the
    /// server locks a table before it runs the statement. By its name or its comment, [`unanswered`](crate::connect::unanswered)
    /// knows a session that writes a record.
    fn wait(limit: i64) -> Self {
        Self { name: "idem_wait", types: "", text: format!("SELECT /* idem_wait */ {}", wait_at_most(limit)) }
    }

    /// Inserts a settled record, where there is none. Only without partitions is there a unique index over all records. With
    /// partitions, two locks keep another session from making the same record. The lock of the operation does so until this
    /// transaction commits. `idem_exclude_v1` does so after that: it waits for sessions that looked for the record before the
    /// commit, and may therefore come after the insert.
    ///
    /// The arguments are in the order of the columns, with the skew for `updated_at`, and how long to keep it for `expires_at`.
    /// Then come the lock, and a number that is returned. `rest` is how long to wait before the next attempt, and the name and the
    /// data of the checkpoint.
    fn insert(schema: &Schema, rest: [&str; 3]) -> Self {
        let [wait, checkpoint_name, checkpoint_data] = rest;
        let at = "\"idem\".idem_at_v1($15)";
        let expires_at = format!("{at} OPERATOR(pg_catalog.+) coalesce({wait}, 0::BIGINT) OPERATOR(pg_catalog.+) $16");
        let text = format!(
            "INSERT INTO \"idem\".idem_records (
                id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state,
                status, headers, body, created_at, updated_at, expires_at, purge_after, not_before, checkpoint_name, checkpoint_data
            ) VALUES (
                $1, pg_catalog.convert_from($2, 'UTF8'), pg_catalog.convert_from($3, 'UTF8'),
                pg_catalog.convert_from($4, 'UTF8'), $5, $6, $7, $8, $9, $10,
                $11, $12, $13, $14, {at}, {expires_at}, {expires_at},
                {at} OPERATOR(pg_catalog.+) {wait}, {checkpoint_name}, {checkpoint_data}
            ) RETURNING \"idem\".idem_exclude_v1(ARRAY[$17]), {RESTORE_WAIT}, $18"
        );
        let types = "(pg_catalog.bytea, pg_catalog.bytea, pg_catalog.bytea, pg_catalog.bytea, SMALLINT, INTEGER, \
                     pg_catalog.bytea, pg_catalog.bytea, BIGINT, SMALLINT, INTEGER, \
                     pg_catalog.bytea, pg_catalog.bytea, BIGINT, BIGINT, BIGINT, BIGINT, BIGINT)";
        Self { name: "idem_insert", types, text: schema.localise(&text) }
    }

    /// Replaces the record of an earlier attempt. The arguments are those of [`insert`](Self::insert), the version, and how long to
    /// wait for the row. It is never prepared: few runs are further attempts.
    fn replace(schema: &Schema) -> Self {
        let text = "SELECT \"idem\".idem_put_v1($1, $22, $3, $5::SMALLINT, $6, $7, $8, $9, $10::SMALLINT, $19, $20, $21, $11, $12, $13, \
             $14, $15, $16, $17, $23), $18";
        Self { name: "", types: "", text: schema.localise(text) }
    }

    /// An expression: whether the lock `$1` of the operation was free. The transaction then holds it.
    ///
    /// Lookups try a second lock and release it at once (idem_lookup_v1), so the wait for it is short. If they tried the
    /// first one, they would turn a first run away. Any role that may connect can keep the second lock, so the wait has a
    /// limit.
    fn try_lock(config: &PostgresConfig) -> String {
        let limit = milliseconds(config.lock_timeout);
        let wait = wait_at_most(limit);
        let second = "$1 OPERATOR(pg_catalog.#) 2::BIGINT";
        format!(
            "CASE WHEN NOT pg_catalog.pg_try_advisory_xact_lock($1) THEN FALSE \
             WHEN pg_catalog.pg_try_advisory_xact_lock({second}) THEN TRUE \
             WHEN {wait} IS NULL THEN FALSE \
             WHEN pg_catalog.pg_advisory_xact_lock({second}) IS NULL THEN FALSE \
             ELSE {RESTORE_WAIT} IS NOT NULL END"
        )
    }

    /// Like [`lock`](Self::lock), but a rollback to a savepoint undoes all that it does. It also returns whether
    /// this transaction has joined the operation before, is read-only, and sees one snapshot.
    fn join_lock(config: &PostgresConfig, schema: &Schema) -> Self {
        let text = format!(
            "SELECT {}, \
             pg_catalog.strpos(given.joined, $2) OPERATOR(pg_catalog.>) 0, \
             pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool, \
             pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.<>) 'read committed', \
             pg_catalog.set_config('idem.joined', given.joined OPERATOR(pg_catalog.||) $2, TRUE) \
             FROM (SELECT coalesce(pg_catalog.current_setting('idem.joined', TRUE), '') AS joined OFFSET 0) AS given",
            Self::try_lock(config),
        );
        Self { name: "", types: "", text: schema.localise(&text) }
    }

    /// [`read`](Self::read) for a transaction of the caller's. Its first column is the place of the records, because the caller's
    /// connection may lead to another database.
    fn join(&self, schema: &Schema) -> Self {
        let text = self.text.replacen("NULL", &schema.localise(IdentifiedSchema::PLACE), 1);
        Self { text, ..self.clone() }
    }

    /// The SQL that prepares it in a session.
    fn prepare(&self) -> String {
        let Self { name, types, text } = self;
        format!("PREPARE {name}{types} AS {text};")
    }

    /// Adds the call of the prepared statement.
    fn write_call(&self, sql: &mut Sql, arguments: &[Argument<'_>]) {
        sql.push("EXECUTE ").push(self.name);
        for (place, argument) in arguments.iter().enumerate() {
            sql.push(if place == 0 { "(" } else { "," });
            argument.write_untyped(sql);
        }
        sql.push(if arguments.is_empty() { ";" } else { ");" });
    }

    /// Adds its text, with the arguments in it.
    fn write_text(&self, sql: &mut Sql, arguments: &[Argument<'_>]) {
        let mut parts = self.text.split('$');
        sql.push(parts.next().unwrap_or_default());
        for part in parts {
            let end = part.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(part.len());
            let (number, rest) = part.split_at(end);
            let argument = number.parse().ok().and_then(|number: usize| arguments.get(number.checked_sub(1)?));
            sql.push("(");
            if let Some(argument) = argument {
                argument.write(sql);
            }
            sql.push(")").push(rest);
        }
        sql.push(";");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_hold_nothing_but_digits() {
        let statement = StoreStatement { name: "name", types: "", text: String::new() };
        let arguments = [
            Argument::Number(Some(i64::MIN)),
            Argument::Number(None),
            Argument::Bytes(Some(b"';--\\")),
            Argument::Bytes(None),
        ];
        let mut sql = Sql::default();
        statement.write_call(&mut sql, &arguments);
        let expected = r"EXECUTE name('-9223372036854775808',NULL,E'\\x273b2d2d5c',NULL);";
        assert_eq!(sql.into_text(), expected);
    }
}
