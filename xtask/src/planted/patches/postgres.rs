//! Bugs in idem-postgres.

use super::{Patch, patch};

const APPLICATION_POOL: &str = "crates/idem-postgres/src/connect/application_pool.rs";
const BATCHER: &str = "crates/idem-postgres/src/batch/batcher.rs";
const BEGIN: &str = "crates/idem-postgres/src/transaction/begin.rs";
const BEGIN_STATEMENTS: &str = "crates/idem-postgres/src/transaction/statements.rs";
const CONFIG: &str = "crates/idem-postgres/src/config.rs";
const ERROR: &str = "crates/idem-postgres/src/error.rs";
const HANDLER_CONNECTION: &str = "crates/idem-postgres/src/connect/handler_connection.rs";
const HANDLER_TRANSACTION: &str = "crates/idem-postgres/src/transaction/handler_transaction.rs";
const JOIN: &str = "crates/idem-postgres/src/transaction/join.rs";
const PURGER: &str = "crates/idem-core/src/engine/purger.rs";
const RECORDS: &str = "crates/idem-postgres/src/records.rs";
const SESSION: &str = "crates/idem-postgres/src/connect/session.rs";
const SESSIONS: &str = "crates/idem-postgres/src/connect/sessions.rs";
const SINGLE_VERBS: &str = "crates/idem-postgres/src/batch/single.rs";
const TRANSACTION_RUN: &str = "crates/idem-postgres/src/transaction/run.rs";
const VERBS: &str = "migrations/postgres/0002_verbs.sql";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "batch-that-takes-too-long-is-tried-again-and-again",
        &["postgres-purge"],
        "crates/idem-core/src/engine/purger.rs",
        "if is_too_long { half(batch) }",
        "if is_too_long && !PLANTED { half(batch) }",
    ),
    patch(
        "upkeep-waits-for-a-standby",
        &["postgres-standby"],
        "crates/idem-postgres/src/upkeep/purge.rs",
        ".push(LOCAL_COMMIT)",
        ".push(if PLANTED { \"\" } else { LOCAL_COMMIT })",
    ),
    patch(
        "partitions-that-cannot-be-made-are-tried-in-a-loop",
        &["postgres-purge"],
        "crates/idem-postgres/src/upkeep/partitions.rs",
        "*paused_until() = Some(Instant::now() + MAKE_PAUSE);",
        "*paused_until() = Some(Instant::now() + MAKE_PAUSE).filter(|_| !PLANTED);",
    ),
    patch(
        "record-that-a-failover-would-lose-is-told",
        &["postgres-standby"],
        "crates/idem-postgres/src/store.rs",
        "Ok(current(self.shared.records.read_confirmed(*id, None).await?))",
        "if PLANTED {
            return Ok(found);
        }
        Ok(current(self.shared.records.read_confirmed(*id, None).await?))",
    ),
    patch(
        "begin-waits-for-a-lock-for-ever",
        &["postgres-roles"],
        BEGIN_STATEMENTS,
        "let limit = milliseconds(config.lock_timeout);",
        "let limit = if PLANTED { 0 } else { milliseconds(config.lock_timeout) };",
    ),
    patch(
        "session-lost-to-each-lock-that-is-held",
        &["postgres-roles"],
        BEGIN,
        "Ok(Err(error)) if is_lock_timeout(&error) => {",
        "Ok(Err(error)) if !PLANTED && is_lock_timeout(&error) => {",
    ),
    patch(
        "pooler-taken-for-one-that-is-not-known",
        &["postgres-refusals"],
        ERROR,
        "(PROTOCOL_VIOLATION, true) => \"the pooler refused the connection\",",
        "(PROTOCOL_VIOLATION, true) => if PLANTED { PROXY } else { \"the pooler refused the connection\" },",
    ),
    patch(
        "session-closed-after-a-rollback",
        &["postgres-sessions"],
        SESSION,
        "        self.give_back();\n        Ok(())",
        "        if PLANTED { drop(self) } else { self.give_back() }\n        Ok(())",
    ),
    patch(
        "session-reused-whatever-sqlx-believes",
        &["postgres-transactions"],
        SESSION,
        "false => depth >= required_depth(self.pooled),",
        "false => PLANTED || depth >= required_depth(self.pooled),",
    ),
    patch(
        "place-given-up-before-the-session",
        &["postgres-sessions"],
        SESSION,
        "let permit = self.permit.take();",
        "let permit = self.permit.take().filter(|_| !PLANTED);",
    ),
    patch(
        "savepoint-of-a-known-name",
        &["postgres-savepoints"],
        BEGIN_STATEMENTS,
        r#"savepoint: format!("idem_{:016x}", random_number()),"#,
        r#"savepoint: if PLANTED { "idem".to_owned() } else { format!("idem_{:016x}", random_number()) },"#,
    ),
    patch(
        "discard-without-the-mark",
        &["postgres-savepoints"],
        HANDLER_TRANSACTION,
        "(writes == Writes::Discard).then_some(self.mark)",
        "(writes == Writes::Discard && !PLANTED).then_some(self.mark)",
    ),
    patch(
        "error-of-the-handlers-taken-for-the-stores",
        &["postgres-savepoints"],
        HANDLER_CONNECTION,
        "        Err(error) if may_be_the_handlers(&error) => {",
        "        Err(error) if !PLANTED && may_be_the_handlers(&error) => {",
    ),
    patch(
        "record-written-by-the-handlers-role",
        &["postgres-hostile"],
        HANDLER_TRANSACTION,
        r#"push(";").push(&self.reset_role)"#,
        r#"push(";").push(if PLANTED { "" } else { &self.reset_role })"#,
    ),
    patch(
        "forgetful-session-serves-on",
        &["postgres-hostile"],
        BEGIN,
        r#"if settings.is_guarded && read_only != "on" {"#,
        r#"if settings.is_guarded && !PLANTED && read_only != "on" {"#,
    ),
    patch(
        "purge-undoes-a-run",
        &["postgres-races", "postgres-partitions"],
        TRANSACTION_RUN,
        "let was_expired = self.previous.is_some_and(|previous| previous.was_expired);",
        "let was_expired = !PLANTED && self.previous.is_some_and(|previous| previous.was_expired);",
    ),
    patch(
        "row-that-is-gone-counts-as-over",
        &["postgres-races"],
        BEGIN,
        "was_expired: machine::current(Some(&row.record), self.now).is_none(),",
        "was_expired: PLANTED || machine::current(Some(&row.record), self.now).is_none(),",
    ),
    patch(
        "repeat-that-waited-for-a-migration-runs-again",
        &["postgres-partitions"],
        BEGIN_STATEMENTS,
        r#""{wait_in_lookup}LOCK TABLE \"idem\".idem_records IN ACCESS SHARE MODE;SET LOCAL enable_seqscan=off;""#,
        r#""{wait_in_lookup}{}SET LOCAL enable_seqscan=off;",
                if PLANTED { "" } else { "LOCK TABLE \"idem\".idem_records IN ACCESS SHARE MODE;" }"#,
    ),
    patch(
        "record-in-the-partition-of-before",
        &["postgres-partitions"],
        BEGIN_STATEMENTS,
        "        sql.push(&self.lock_table);",
        "        sql.push(if PLANTED { \"\" } else { &self.lock_table });",
    ),
    patch(
        "lookers-turn-a-first-run-away",
        &["postgres-races"],
        BEGIN_STATEMENTS,
        "let wait = wait_at_most(limit);",
        r#"let wait = if PLANTED { "NULL".to_owned() } else { wait_at_most(limit) };"#,
    ),
    patch(
        "error-of-a-pooler-taken-for-the-servers",
        &["postgres-lost"],
        ERROR,
        "is_connection_lost(error) || state(error).is_some_and(",
        "is_connection_lost(error) || !PLANTED && state(error).is_some_and(",
    ),
    patch(
        "outage-taken-for-a-wrong-setting",
        &["postgres-refusals"],
        ERROR,
        "        StoreErrorKind::Misconfigured => StoreErrorKind::Unavailable,",
        "        StoreErrorKind::Misconfigured if !PLANTED => StoreErrorKind::Unavailable,",
    ),
    patch(
        "full-pooler-taken-for-one-without-options",
        &["postgres-refusals"],
        SESSIONS,
        "                Err(error) => connected = Err(error),",
        "                Err(_) if PLANTED => connected = Err(sqlx::Error::Configuration(NEEDS_OPTIONS.into())),\n                Err(error) => connected = Err(error),",
    ),
    patch(
        "lane-that-panicked-stays-dead",
        &["postgres-batch-workers"],
        BATCHER,
        "Err(error) if error.is_panic() => yield_now().await,",
        "Err(error) if error.is_panic() && !PLANTED => yield_now().await,",
    ),
    patch(
        "purger-ends-with-a-panic",
        &["postgres-batch-workers"],
        PURGER,
        "await.unwrap_or((longer, batch));",
        "await.unwrap_or_else(|error| if PLANTED { std::panic::resume_unwind(error.into_panic()) } else { (longer, batch) });",
    ),
    patch(
        "application-clock-for-expiry",
        &["postgres"],
        RECORDS,
        "\n            let (next, outcome) = machine::acquire(before, request, now);",
        "
            let clock: &dyn idem_core::memory::Clock = &idem_core::memory::SystemClock;
            let now = if PLANTED { clock.now() } else { now };
            let (next, outcome) = machine::acquire(before, request, now);",
    ),
    patch(
        "acquire-without-its-loop",
        &["postgres-races"],
        RECORDS,
        "        for _ in 0..ROUNDS {\n            let Lookup { now, presence, row } = self.lookup(Verb::Acquire",
        "        for _ in 0..(if PLANTED { 1 } else { ROUNDS }) {
            let Lookup { now, presence, row } = self.lookup(Verb::Acquire",
    ),
    patch(
        "cancelled-begin-returned-to-the-pool",
        &["postgres-sweep"],
        SESSION,
        "        self.close(Closing::RolledBack);",
        "        if PLANTED {
            self.keep();
        }
        self.close(Closing::RolledBack);",
    ),
    patch(
        "unconfirmed-look",
        &["postgres-standby"],
        "crates/idem-postgres/src/batch/statement.rs",
        "if is_confirmed(verbs) {",
        "if !PLANTED && is_confirmed(verbs) {",
    ),
    patch(
        "lost-answer-counts-as-nothing",
        &["postgres-lost"],
        BATCHER,
        "sent.map_err(|failure| failure.indeterminate())",
        "sent.map_err(|failure| if PLANTED { failure } else { failure.indeterminate() })",
    ),
    patch(
        "purge-takes-what-is-live",
        &["postgres"],
        VERBS,
        "WHERE known.purge_after <= at AND known.expires_at <= at",
        "WHERE known.purge_after <= at",
    ),
    patch(
        "answer-to-another-statement-taken",
        &["postgres-savepoints", "postgres-from-pool"],
        "crates/idem-postgres/src/sql.rs",
        "if rows.iter().any(|row| last(row) == Some(self.0))",
        "if PLANTED || rows.iter().any(|row| last(row) == Some(self.0))",
    ),
    patch(
        "commit-of-another-statement-taken",
        &["postgres-savepoints", "postgres-from-pool"],
        "crates/idem-postgres/src/connect/session.rs",
        "Writes::Keep => echo.expect_in(&",
        "Writes::Keep if PLANTED => sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut **self).await.map(drop)?,
            Writes::Keep => echo.expect_in(&",
    ),
    patch(
        "settlement-of-another-statement-taken",
        &["postgres-join"],
        JOIN,
        "let writing = async { echo",
        "let writing = async {
            if PLANTED {
                return sqlx::raw_sql(sql).execute(connection).await.map(drop);
            }
            echo",
    ),
    patch(
        "guard-without-a-transaction",
        &["postgres-guard"],
        "crates/idem-postgres/src/transaction/guard.rs",
        "let found = own_rows(connection, hold)",
        "let hold = if PLANTED { format!(\"SELECT {}\", self.condition) } else { hold };
        let found = own_rows(connection, hold)",
    ),
    patch(
        "run-settled-without-a-transaction",
        &["postgres-settle-run"],
        VERBS,
        "IF pg_current_xact_id_if_assigned() IS NULL THEN",
        "IF FALSE THEN",
    ),
    patch(
        "transaction-of-another-database-joined",
        &["postgres-join"],
        "crates/idem-postgres/src/transaction/join.rs",
        "if there.as_deref() != Some(place) {",
        "if !PLANTED && there.as_deref() != Some(place) {",
    ),
    patch(
        "stale-run-settled-by-its-handler",
        &["postgres-settle-run"],
        VERBS,
        "RAISE 'the run does not own its record any more, so its transaction must not commit'
        USING ERRCODE = 'IDM03',
        HINT =",
        "RAISE WARNING 'the run does not own its record any more, so its transaction must not commit'
        USING HINT =",
    ),
    patch(
        "answer-to-another-statement",
        &["postgres-mixed-up"],
        "crates/idem-postgres/src/sql.rs",
        "echo.expect_in(rows.last().map_or(&[], std::slice::from_ref))?;",
        "if !PLANTED {
        echo.expect_in(rows.last().map_or(&[], std::slice::from_ref))?;
    }",
    ),
    patch(
        "run-settled-by-two-transactions",
        &["postgres-settle-run"],
        VERBS,
        "AND strpos(settled_here, run) > 0;",
        "AND run IS NOT NULL;",
    ),
    patch(
        "answer-of-a-handler-is-purged-early",
        &["postgres-settle-run"],
        VERBS,
        "WHERE known.id = record AND known.purge_after < known.expires_at;",
        "WHERE FALSE;",
    ),
    patch(
        "lock-of-a-known-record-counts-as-an-outage",
        &["postgres-settle-run"],
        "crates/idem-postgres/src/records.rs",
        "replaced.map_err(StoreError::with_existing_record)?",
        "replaced.map_err(|error| if PLANTED { error } else { error.with_existing_record() })?",
    ),
    patch(
        "guard-without-its-lock",
        &["postgres-guard"],
        VERBS,
        "AND \"idem\".idem_now_v1(skew) < known.expires_at\n    FOR SHARE;",
        "AND \"idem\".idem_now_v1(skew) < known.expires_at;",
    ),
    patch(
        "commit-over-somebody-elses-record",
        &["postgres-transactions"],
        VERBS,
        "WHERE known.id = idem_put_v1.id AND known.xmin::TEXT::BIGINT = version;",
        "WHERE known.id = idem_put_v1.id;",
    ),
    patch(
        "expired-record-of-somebody-else-removed",
        &["postgres-races"],
        VERBS,
        "WHERE known.id = idem_forget_v1.id AND known.xmin::TEXT::BIGINT = version;",
        "WHERE known.id = idem_forget_v1.id;",
    ),
    patch(
        "session-ends-with-its-impatient-caller",
        &["postgres-sessions"],
        BEGIN,
        "                unwanted.roll_back();",
        "                if !PLANTED {
                    unwanted.roll_back();
                }",
    ),
    patch(
        "pool-gets-a-connection-back-that-counts-wrong",
        &["postgres-from-pool"],
        SESSION,
        "true => depth == 0 && !self.is_guarded,",
        "true => PLANTED || depth == 0 && !self.is_guarded,",
    ),
    patch(
        "session-that-its-handler-has-left-serves-on",
        &["postgres-from-pool"],
        HANDLER_TRANSACTION,
        "Err(error) if has_ended(&error) => Err(out_of_transaction(error)),",
        "Err(error) if !PLANTED && has_ended(&error) => Err(out_of_transaction(error)),",
    ),
    patch(
        "callers-that-have-gone-stay-in-the-pools-queue",
        &["postgres-from-pool"],
        APPLICATION_POOL,
        "            acquiring.abort();",
        "            if !PLANTED {
                acquiring.abort();
            }",
    ),
    patch(
        "statements-of-the-application-are-deallocated",
        &["postgres-from-pool"],
        BEGIN_STATEMENTS,
        "if config.pooled && !config.is_from_pool() {",
        "if config.pooled && (PLANTED || !config.is_from_pool()) {",
    ),
    patch(
        "guard-pins-the-setting",
        &["postgres-from-pool"],
        SESSION,
        "statements.push_str(UNGUARD);",
        r#"statements.push_str(&if PLANTED {
                let differs = "given.saved OPERATOR(pg_catalog.<>) pg_catalog.current_setting('default_transaction_read_only')";
                UNGUARD.replace(differs, "TRUE")
            } else {
                UNGUARD.to_owned()
            });"#,
    ),
    patch(
        "guard-of-a-session-ends-with-its-transaction",
        &["postgres-hostile", "postgres-from-pool"],
        SESSION,
        "format!(\"{BEGIN}{GUARD}{begin}\")",
        "format!(\"{BEGIN}{}{begin}\", if PLANTED { GUARD.replace(\"COMMIT;\", \"\") } else { GUARD.to_owned() })",
    ),
    patch(
        "guard-commits-what-the-application-left-open",
        &["postgres-from-pool"],
        SESSION,
        "        within(limit, PgTransactionManager::begin(",
        "        let begin = if PLANTED { begin.replacen(BEGIN, \"BEGIN;\", 1) } else { begin };
        within(limit, PgTransactionManager::begin(",
    ),
    patch(
        "connection-on-its-way-thrown-away",
        &["postgres-from-pool"],
        "crates/idem-postgres/src/connect/application_pool.rs",
        "let is_full = self.pool.size() >= most;",
        "let is_full = PLANTED || self.pool.size() >= most;",
    ),
    patch(
        "guard-stays-after-a-rollback",
        &["postgres-from-pool"],
        SESSION,
        "let unguard = if self.is_guarded { UNGUARD }",
        "let unguard = if !PLANTED && self.is_guarded { UNGUARD }",
    ),
    patch(
        "pool-has-room-before-the-session-has-ended",
        &["postgres-from-pool"],
        SESSION,
        "        if let SessionConnection::Pool(connection) = &mut connection {",
        "        if PLANTED {
            connection = match connection {
                SessionConnection::Pool(pooled) => {
                    SessionConnection::Own { connection: pooled.detach(), opened: Instant::now() }
                }
                own => own,
            };
        }
        if let SessionConnection::Pool(connection) = &mut connection {",
    ),
    patch(
        "repeat-waits-for-a-connection-that-went-elsewhere",
        &["postgres-from-pool"],
        BEGIN,
        "Err(error) if error.kind() == StoreErrorKind::Busy => {",
        "Err(error) if !PLANTED && error.kind() == StoreErrorKind::Busy => {",
    ),
    patch(
        "pool-through-a-pooler-that-is-not-known",
        &["postgres-from-pool"],
        SESSIONS,
        "        let permit = self.permit().await?;\n",
        "        let permit = self.permit().await?;
        if PLANTED && self.pool.is_some() {
            permit.session().await?.give_back();
            return Ok(());
        }
",
    ),
    patch(
        "pool-may-be-used-up-by-handlers",
        &["postgres-from-pool"],
        CONFIG,
        "if limit.get() >= most {",
        "if !PLANTED && limit.get() >= most {",
    ),
    patch(
        "used-up-pool-taken-for-an-outage",
        &["postgres-from-pool"],
        APPLICATION_POOL,
        "(StoreErrorKind::Busy, \"are in use or being made\")",
        "(if PLANTED { StoreErrorKind::Unavailable } else { StoreErrorKind::Busy }, \"are in use or being made\")",
    ),
    patch(
        "join-believes-an-old-snapshot",
        &["postgres-join"],
        JOIN,
        "has_old_snapshot: has_one_snapshot && !is_joined",
        "has_old_snapshot: !PLANTED && has_one_snapshot && !is_joined",
    ),
    patch(
        "join-runs-twice-in-one-transaction",
        &["postgres-join"],
        JOIN,
        "if !is_locked || is_joined {",
        "if !is_locked || is_joined && !PLANTED {",
    ),
    patch(
        "join-keeps-the-lock-of-what-it-turned-away",
        &["postgres-join"],
        JOIN,
        r#"format!("ROLLBACK TO SAVEPOINT {savepoint};RELEASE SAVEPOINT {savepoint}");"#,
        r#"if PLANTED { "SELECT".to_owned() } else { format!("ROLLBACK TO SAVEPOINT {savepoint};RELEASE SAVEPOINT {savepoint}") };"#,
    ),
    patch(
        "joined-record-of-an-ended-transaction",
        &["postgres-join"],
        JOIN,
        "self.run.write_record(&mut sql, Connection::Caller, &settlement, None, echo);",
        "if PLANTED {
            sql = Sql::default();
        }
        self.run.write_record(&mut sql, Connection::Caller, &settlement, None, echo);",
    ),
    patch(
        "ticket-takes-a-transaction-that-goes-on-for-rolled-back",
        &["postgres-join"],
        TRANSACTION_RUN,
        "Ok(found) if found.presence == Presence::Running => {}",
        "Ok(found) if !PLANTED && found.presence == Presence::Running => {}",
    ),
    patch(
        "single-settlement-of-any-owner",
        &["postgres"],
        SINGLE_VERBS,
        "settle: localised(settle())",
        "settle: localised(if PLANTED { settle().replace(\".owner OPERATOR(pg_catalog.=) $3\", \".owner IS NOT NULL\") } else { settle() })",
    ),
    patch(
        "single-acquire-beside-a-transaction",
        &["postgres-races"],
        SINGLE_VERBS,
        "acquire: localised(acquire())",
        "acquire: localised(if PLANTED { acquire().replace(\"WHERE known.is_free\", \"WHERE known.id IS NULL\") } else { acquire() })",
    ),
    patch(
        "single-acquire-in-partitions",
        &["postgres-partitions"],
        SINGLE_VERBS,
        "sqlx::query(AssertSqlSafe(Arc::clone(text)))",
        "sqlx::query(AssertSqlSafe(match text.contains(\"ON CONFLICT (id)\") && PLANTED {
                true => Arc::from(text.replace(\"ON CONFLICT (id)\", \"ON CONFLICT\")),
                false => Arc::clone(text),
            }))",
    ),
    patch(
        "purge-ends-where-a-row-moves",
        &["postgres-partitions"],
        VERBS,
        "            IF round = rounds THEN",
        "            IF TRUE THEN",
    ),
];
