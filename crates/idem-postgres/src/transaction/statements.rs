//! The statements that every handler's transaction begins with.

use std::sync::OnceLock;

use idem_core::RecordId;

use crate::batch::row::RECORD_COLUMNS;
use crate::config::{Isolation, PostgresConfig};
use crate::connect::options::transaction_settings;
use crate::connect::server::Server;
use crate::schema::name::{IdentifiedSchema, Schema};
use crate::sql::{Sql, milliseconds, random_number, set_for_transaction};

/// The statements and settings of handlers' transactions.
#[derive(Debug)]
pub(crate) struct TransactionSettings {
    /// The BEGIN statement. In a session of the application's pool sqlx sends it, so that sqlx counts the transaction.
    pub(crate) begin: String,
    /// Whether the session is of a pool of the application, whose role and user the lock statement then answers.
    pub(crate) is_from_pool: bool,
    lock: BeginStatement,
    look_settings: String,
    look: BeginStatement,
    /// The same two for a transaction that the caller opened, where nothing is prepared and no setting may change.
    join_lock: BeginStatement,
    join_look: BeginStatement,
    clear_mark: String,
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
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(pub(crate) i64);

impl Mark {
    pub(crate) fn random() -> Self {
        Self(random_number())
    }
}

impl TransactionSettings {
    pub(crate) fn new(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        let begin = format!(
            "BEGIN ISOLATION LEVEL {}{} NOT DEFERRABLE;",
            config.isolation.sql(),
            if config.pooled { "" } else { " READ WRITE" },
        );
        let [lock, look] = BeginStatement::both(config, schema, server);
        let [join_lock, join_look] = [BeginStatement::join_lock(config, schema), look.join(schema)];
        // Statements that sqlx has prepared in a pool of the application stay: it expects to find them.
        let unprepare =
            if config.pooled && !config.is_from_pool() { "SELECT \"idem\".idem_unprepare_v1();" } else { "" };
        Self {
            begin,
            is_from_pool: config.is_from_pool(),
            lock,
            look_settings: look_settings(config),
            look,
            join_lock,
            join_look,
            clear_mark: schema.localise(&format!("SET LOCAL idem.mark='';{unprepare}")),
            savepoint: format!("idem_{:016x}", Mark::random().0),
            max_transactions: config.max_transactions.get(),
            is_guarded: !config.pooled,
            lock_timeout: milliseconds(config.lock_timeout),
            has_one_snapshot: config.isolation != Isolation::ReadCommitted,
        }
    }

    /// The SQL that prepares these statements in an exclusive session.
    pub(crate) fn prepare(&self) -> String {
        [&self.lock, &self.look].map(BeginStatement::prepare).concat()
    }

    /// The message that begins a transaction, tries to lock an operation, and looks up its record.
    pub(crate) fn sql(&self, lock: i64, id: &RecordId, skew: i64, mark: Mark) -> String {
        let (mut lock_and_mark, mut look) = ([Sql::default(), Sql::default()], [Sql::default(), Sql::default()]);
        lock_and_mark[0].number(lock);
        lock_and_mark[1].number(mark.0);
        look[0].number(skew);
        look[1].bytes(id.as_bytes());
        let mut sql = Sql::default();
        if !self.is_from_pool {
            sql.push(&self.begin);
        }
        // A separate statement: the next one sees what the previous holder of the lock has committed.
        self.lock.write_call(&mut sql, lock_and_mark);
        sql.push("SAVEPOINT ").push(&self.savepoint).push(";");
        sql.push(&self.look_settings);
        self.look.write_call(&mut sql, look);
        // Undoes the settings, which are not the handler's, and the lock on the table. If it were kept while the handler
        // runs, no other session could drop a partition.
        sql.push("ROLLBACK TO SAVEPOINT ").push(&self.savepoint).push(";");
        sql.push(&self.clear_mark);
        sql.into_text()
    }

    /// The message that tries to lock an operation in the caller's transaction, and looks up its record. Without a
    /// transaction, SAVEPOINT fails. A rollback to the first savepoint undoes everything, the lock too.
    pub(crate) fn join_sql(&self, lock: i64, id: &RecordId, skew: i64) -> String {
        let [join, look_only] = [Self::join_savepoint(), &format!("{}_look", self.savepoint)];
        let (mut lock_and_name, mut look) = ([Sql::default(), Sql::default()], [Sql::default(), Sql::default()]);
        lock_and_name[0].number(lock);
        // The setting `idem.joined` lists the locks of all joined operations, between commas.
        lock_and_name[1].push(&format!("',{lock},'"));
        look[0].number(skew);
        look[1].bytes(id.as_bytes());
        let mut sql = Sql::default();
        sql.push("SAVEPOINT ").push(join).push(";");
        self.join_lock.write_call(&mut sql, lock_and_name);
        sql.push("SAVEPOINT ").push(look_only).push(";");
        sql.push(&self.look_settings);
        self.join_look.write_call(&mut sql, look);
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
            "SELECT CASE WHEN pg_catalog.strpos(pg_catalog.current_setting('idem.joined', TRUE), ',{lock},') \
             OPERATOR(pg_catalog.>) 0 THEN '' ELSE pg_catalog.current_setting('idem.not_joined') END;"
        )
    }
}

/// The settings for the lookup of the record, which the handler does not get: how long to wait for the table, how the server
/// writes bytes, and how it plans. A plan is kept, so it must use the index even if it is made while the table is nearly
/// empty.
fn look_settings(config: &PostgresConfig) -> String {
    let wait = milliseconds(config.lock_timeout).to_string();
    let settings = [
        ("lock_timeout", wait.as_str()),
        ("bytea_output", "hex"),
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_indexscan", "on"),
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
    ];
    settings.map(|(name, value)| format!("SET LOCAL {name}={value};")).concat()
}

/// A column for [`BeginStatement::try_lock`]: the `lock_timeout` before the store changes it.
const LOCK_TIMEOUT_BEFORE: &str = "pg_catalog.current_setting('lock_timeout') AS lock_timeout";

/// A statement that each transaction begins with. An exclusive session keeps it prepared, because parsing and planning cost
/// the server more than running it.
#[derive(Debug, Clone)]
struct BeginStatement {
    name: &'static str,
    types: &'static str,
    /// With `$1` and so on where the arguments belong.
    text: String,
    is_prepared: bool,
}

impl BeginStatement {
    /// The one that locks the operation, and the one that looks up its record.
    fn both(config: &PostgresConfig, schema: &Schema, server: &Server) -> [Self; 2] {
        let is_prepared = config.has_own_sessions();
        let statement = |name, types, text: &str| Self { name, types, text: schema.localise(text), is_prepared };
        // In every transaction, because an earlier handler may have set something else, and no transaction may keep its key
        // for ever.
        let settings = set_for_transaction(transaction_settings(config, server));
        let try_lock = Self::try_lock(config);
        // A session of a pool may have a role that the application gave it.
        let role = ", pg_catalog.current_setting('session_authorization'), pg_catalog.current_setting('role')";
        let role = if config.is_from_pool() { role } else { "" };
        let lock = format!(
            "SELECT {try_lock}, {settings}, pg_catalog.set_config('idem.mark', $2::pg_catalog.text, TRUE), \
             pg_catalog.current_setting('default_transaction_read_only'), \
             pg_catalog.set_config('idem.joined', pg_catalog.concat(',', $1, ','), TRUE){role} \
             FROM (SELECT {LOCK_TIMEOUT_BEFORE} OFFSET 0) AS given"
        );
        // OFFSET 0 keeps the parts apart: the time is read once, and each record is looked for by its id.
        let look = format!(
            "SELECT given.read_only, CASE WHEN known.id IS NULL THEN 4 ELSE 2 END, given.at, {RECORD_COLUMNS} FROM (
                SELECT \"idem\".idem_now_v1($1) AS at,
                    pg_catalog.set_config('default_transaction_read_only', NULL, TRUE) AS read_only OFFSET 0
            ) AS given LEFT JOIN LATERAL (
                SELECT one.xmin AS version, one.* FROM \"idem\".idem_records AS one
                WHERE one.id OPERATOR(pg_catalog.=) $2 OFFSET 0
            ) AS known ON TRUE"
        );
        [statement("idem_lock", "(BIGINT, BIGINT)", &lock), statement("idem_look", "(BIGINT, pg_catalog.bytea)", &look)]
    }

    /// An expression: whether the lock `$1` of the operation was free. The transaction then holds it. `given` has the
    /// application's `lock_timeout`, which the expression restores.
    ///
    /// Lookups try a second lock and release it at once (idem_lookup_v1), so the wait for it is short. If they tried the
    /// first one, they would turn a first run away. Any role that may connect can keep the second lock, so the wait has a
    /// limit.
    fn try_lock(config: &PostgresConfig) -> String {
        let wait = milliseconds(config.lock_timeout);
        let is_not_locked = "pg_catalog.pg_advisory_xact_lock($1 OPERATOR(pg_catalog.#) 2::BIGINT) IS NULL";
        format!(
            "CASE WHEN NOT pg_catalog.pg_try_advisory_xact_lock($1) THEN FALSE \
             WHEN pg_catalog.set_config('lock_timeout', '{wait}', TRUE) IS NULL THEN FALSE \
             WHEN {is_not_locked} THEN FALSE \
             ELSE pg_catalog.set_config('lock_timeout', given.lock_timeout, TRUE) IS NOT NULL END"
        )
    }

    /// Like the first of [`both`](Self::both), but a rollback to a savepoint undoes all that it does. It also returns whether
    /// this transaction has joined the operation before, is read-only, and sees one snapshot.
    fn join_lock(config: &PostgresConfig, schema: &Schema) -> Self {
        let text = format!(
            "SELECT {}, \
             pg_catalog.strpos(given.joined, $2) OPERATOR(pg_catalog.>) 0, \
             pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool, \
             pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.<>) 'read committed', \
             pg_catalog.set_config('idem.joined', given.joined OPERATOR(pg_catalog.||) $2, TRUE) \
             FROM (SELECT {LOCK_TIMEOUT_BEFORE}, \
                 coalesce(pg_catalog.current_setting('idem.joined', TRUE), '') AS joined OFFSET 0) AS given",
            Self::try_lock(config),
        );
        Self { name: "", types: "", text: schema.localise(&text), is_prepared: false }
    }

    /// The second of [`both`](Self::both) for a transaction of the caller's. Its first column is the place of the records, because
    /// the caller's connection may lead to another database.
    fn join(&self, schema: &Schema) -> Self {
        let text = self.text.replacen("given.read_only", &schema.localise(IdentifiedSchema::PLACE), 1);
        Self { text, is_prepared: false, ..self.clone() }
    }

    /// The SQL that prepares it in a session.
    fn prepare(&self) -> String {
        let Self { name, types, text, .. } = self;
        format!("PREPARE {name}{types} AS {text};")
    }

    fn write_call(&self, sql: &mut Sql, arguments: [Sql; 2]) {
        let arguments = arguments.map(Sql::into_text);
        if self.is_prepared {
            sql.push("EXECUTE ").push(self.name).push("(").push(&arguments.join(",")).push(")");
        } else {
            let mut text = self.text.clone();
            for (index, argument) in arguments.iter().enumerate() {
                text = text.replace(&format!("${}", index + 1), &format!("({argument})"));
            }
            sql.push(&text);
        }
        sql.push(";");
    }
}
