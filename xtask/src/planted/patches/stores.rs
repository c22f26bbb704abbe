//! Bugs in the other stores.

use super::{Patch, edit, patch};

const SHARED_CONNECTION: &str = "crates/idem-redis/src/shared_connection.rs";
const TRANSPORT: &str = "crates/idem-redis/src/transport.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "unknown-outcome-is-cached-as-final",
        &["hybrid-units"],
        "crates/idem-hybrid/src/entry.rs",
        "filter(|replay| replay.kind != ReplayKind::OutcomeUnknown)",
        "filter(|replay| PLANTED || replay.kind != ReplayKind::OutcomeUnknown)",
    )
    .also(&[edit(
        "crates/idem-hybrid/src/shared.rs",
        "matches!(outcome, AcquireOutcome::Replay(replay) if replay.kind",
        "matches!(outcome, AcquireOutcome::Replay(replay) if PLANTED || replay.kind",
    )]),
    patch(
        "redis-cancelled-connect-stays",
        &["redis-connecting"],
        SHARED_CONNECTION,
        "!self.task.is_finished() && ",
        "(PLANTED || !self.task.is_finished()) && ",
    ),
    patch(
        "redis-stuck-connect-stays",
        &["redis-connecting"],
        SHARED_CONNECTION,
        "Instant::now() < self.until",
        "(PLANTED || Instant::now() < self.until)",
    ),
    patch(
        "redis-cancelled-connect-fails-others",
        &["redis-connecting"],
        SHARED_CONNECTION,
        "for _ in 0..2 {",
        "for _ in 0..(if PLANTED { 1 } else { 2 }) {",
    ),
    patch(
        "redis-attempts-on-other-dead-connections",
        &["redis-connecting"],
        TRANSPORT,
        "let shared = self.connection_for(question);\n        loop {",
        "let (first, mut again) = (self.connection_for(question), false);
        loop {
            let shared = if std::mem::replace(&mut again, true) && PLANTED { self.connection_for(question) } else { first };",
    ),
    patch(
        "redis-subscription-ends-with-its-runtime",
        &["redis-connecting"],
        "crates/idem-redis/src/subscription.rs",
        "self.listen(false);",
        "if !PLANTED { self.listen(false); }",
    ),
    patch(
        "redis-refused-login-is-final",
        &["redis-refusals"],
        "crates/idem-redis/src/error.rs",
        "Phase::Serving => (StoreErrorKind::Unavailable, hint),",
        "Phase::Serving if PLANTED => (StoreErrorKind::Misconfigured, hint), Phase::Serving => (StoreErrorKind::Unavailable, hint),",
    ),
    patch(
        "redis-refused-script-did-nothing",
        &["redis-refusals"],
        TRANSPORT,
        "!matches!(kind, ServerErrorKind::ResponseError | ServerErrorKind::NoPerm)",
        "PLANTED || !matches!(kind, ServerErrorKind::ResponseError | ServerErrorKind::NoPerm)",
    ),
    patch(
        "sqlite-ended-task-stays",
        &["sqlite-tasks"],
        "crates/idem-sqlite/src/queue.rs",
        "if sender.is_closed() {",
        "if !PLANTED && sender.is_closed() {",
    ),
    patch(
        "sqlite-unbounded-queue",
        &["sqlite-tasks"],
        "crates/idem-sqlite/src/permits.rs",
        "Semaphore::new(WAITING)",
        "Semaphore::new(if PLANTED { Semaphore::MAX_PERMITS } else { WAITING })",
    ),
    patch(
        "sqlite-waits-when-its-caller-is-gone",
        &["sqlite-tasks"],
        "crates/idem-sqlite/src/store.rs",
        "self.permits.enter().map_err(failed)?.permit().await.map_err(failed)?;",
        r#"if PLANTED {
            let ended = |error| StoreError::new(StoreErrorKind::Unavailable, "a task ended").with_source(error);
            tokio::spawn(self.permits.enter().map_err(failed)?.permit()).await.map_err(ended)?.map_err(failed)?
        } else {
            self.permits.enter().map_err(failed)?.permit().await.map_err(failed)?
        };"#,
    ),
    patch(
        "sqlite-read-only-is-final",
        &["sqlite-outages"],
        "crates/idem-sqlite/src/error.rs",
        "let unavailable = |hint| (StoreErrorKind::Unavailable, hint);",
        "let unavailable = |hint| (if PLANTED { StoreErrorKind::Misconfigured } else { StoreErrorKind::Unavailable }, hint);",
    ),
    patch(
        "sqlite-connections-stay-read-only",
        &["sqlite-outages"],
        "crates/idem-sqlite/src/store.rs",
        ".max_connections(config.max_transactions.get())\n                .max_lifetime(LIFETIME)",
        ".max_connections(config.max_transactions.get())
                .max_lifetime(if PLANTED { Duration::from_secs(1_800) } else { LIFETIME })",
    ),
    patch(
        "reader-fails-while-another-writes",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/transaction.rs",
        "if is_old_snapshot(&error) || is_busy(&error) => {",
        "if is_old_snapshot(&error) || (!PLANTED && is_busy(&error)) => {",
    ),
    patch(
        "sqlite-attached-write-is-lost",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "fetch_one(&mut *self.connection).await? > 0)",
        "fetch_one(&mut *self.connection).await? > if PLANTED { 9 } else { 0 })",
    ),
    patch(
        "read-only-connection-of-the-application-used",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "if is_shared && state.query_only != 0 {",
        "if !PLANTED && is_shared && state.query_only != 0 {",
    ),
    patch(
        "sqlite-waits-for-a-transaction-for-ever",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/permits.rs",
        "let deadline = Instant::now() + self.wait;",
        "let deadline = Instant::now() + if PLANTED { Duration::from_secs(60) } else { self.wait };",
    ),
    patch(
        "sqlite-connection-of-a-dropped-run-stays",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "if !self.is_clean {",
        "if !PLANTED && !self.is_clean {",
    ),
    patch(
        "sqlite-pool-syncs-less",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/store.rs",
        "if synchronous < least {",
        "if !PLANTED && synchronous < least {",
    ),
    patch(
        "sqlite-goes-on-in-a-transaction-of-the-application",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "if !connection.is_in_transaction() {",
        "if PLANTED || !connection.is_in_transaction() {",
    ),
    patch(
        "sqlite-changed-setting-stays",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "busy_timeout: row.try_get(3)?,",
        "busy_timeout: if PLANTED { 0 } else { row.try_get(3)? },",
    ),
    patch(
        "sqlite-pool-gets-a-failed-connection-back",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "if !self.is_shared {",
        "if PLANTED || !self.is_shared {",
    ),
    patch(
        "sqlite-refused-commit-is-unclear",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/error.rs",
        "primary_code(error) == Some(CONSTRAINT)",
        "!PLANTED && primary_code(error) == Some(CONSTRAINT)",
    ),
    patch(
        "sqlite-pool-only-reads",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/store.rs",
        "expect_writable(&mut connection).await?;",
        "if !PLANTED { expect_writable(&mut connection).await?; }",
    ),
    patch(
        "sqlite-cache-is-shared",
        &["sqlite-from-pool"],
        "crates/idem-sqlite/src/config.rs",
        "options.shared_cache(false)",
        "if PLANTED { options } else { options.shared_cache(false) }",
    ),
    patch(
        "hybrid-lock-outlives-a-run-that-its-handler-settled",
        &["hybrid-transactions"],
        "crates/idem-hybrid/src/shared.rs",
        "if outcome == OwnerOutcome::LeaseLost && !self.is_still_of(lease).await {",
        "if outcome == OwnerOutcome::LeaseLost && (PLANTED || !self.is_still_of(lease).await) {",
    ),
    patch(
        "a-renewal-that-is-given-up-blames-the-store",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/shared.rs",
        "self.heard(self.durable.renew(lease, term).await)?",
        "if PLANTED { self.decide(self.durable.renew(lease, term)).await } else { \
         self.heard(self.durable.renew(lease, term).await) }?",
    ),
    patch(
        "a-pool-stays-in-the-database-it-was-left-in",
        &["redis-pool"],
        "crates/idem-redis/src/pool.rs",
        "let mut select = redis::cmd(\"SELECT\");",
        "let mut select = redis::cmd(if PLANTED { \"ECHO\" } else { \"SELECT\" });",
    ),
    patch(
        "database-of-a-hook-not-noticed",
        &["redis-pool"],
        "crates/idem-redis/src/servers.rs",
        "&& named != selected",
        "&& named != selected && !PLANTED",
    ),
    patch(
        "connection-of-a-pool-gives-up-early",
        &["redis-pool"],
        "crates/idem-redis/src/pool.rs",
        "handle.set_response_timeout(deadline * 2);",
        "if !PLANTED {
        handle.set_response_timeout(deadline * 2);
    }",
    ),
    patch(
        "pool-in-use-taken-for-an-outage",
        &["redis-pool"],
        "crates/idem-redis/src/pool.rs",
        "status.available == 0 &&",
        "!PLANTED && status.available == 0 &&",
    ),
    patch(
        "removed-claims-wake-waiters",
        &["redis-fast"],
        "crates/idem-redis/src/fast.rs",
        "let (rank, told) = (rank.to_string(), self.shared.keys.of(id));",
        "let (rank, told) = (format!(\"{}{rank}\", if PLANTED { \"0\" } else { \"\" }), self.shared.keys.of(id));",
    ),
    patch(
        "hybrid-runs-unprotected-what-it-may-not-answer",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/shared.rs",
        "Err(if fast.is_turned_away {",
        "Err(if fast.is_turned_away && !PLANTED {",
    ),
    patch(
        "hybrid-waits-for-ever-for-what-it-may-not-answer",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/shared.rs",
        "if !fast.is_turned_away {",
        "if PLANTED || !fast.is_turned_away {",
    ),
    patch(
        "hybrid-release-without-an-attempt-wakes-nobody",
        &["hybrid-races"],
        "crates/idem-hybrid/src/shared.rs",
        "locked.unwrap_or(lease.attempt).max(1)",
        "locked.unwrap_or(lease.attempt).max(u32::from(!PLANTED))",
    ),
    patch(
        "hybrid-self-test-asks-the-lock-alone",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/store.rs",
        "idem_core::self_test(&alone).await?;",
        "if !PLANTED {
            idem_core::self_test(&alone).await?;
        }",
    ),
    patch(
        "hybrid-forgets-a-run-that-is-asked-for-again",
        &["hybrid-races"],
        "crates/idem-hybrid/src/shared.rs",
        "if run.is_new && !error.is_indeterminate() {",
        "if (run.is_new || PLANTED) && !error.is_indeterminate() {",
    ),
    patch(
        "hybrid-lock-of-a-repeated-settlement-stays",
        &["hybrid-races"],
        "crates/idem-hybrid/src/shared.rs",
        "let may_be_locked = run.is_none_or(|run| run.locked.is_some());",
        "let may_be_locked = run.map_or(!PLANTED, |run| run.locked.is_some());",
    ),
    patch(
        "hybrid-copies-in-vain-at-every-repeat",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/shared.rs",
        "Some(Some(failed_at)) if failed_at.elapsed() < COPY_AGAIN =>",
        "Some(Some(failed_at)) if !PLANTED && failed_at.elapsed() < COPY_AGAIN =>",
    ),
    patch(
        "hybrid-health-only-reads",
        &["hybrid-cache"],
        "crates/idem-hybrid/src/cache.rs",
        "self.bounded(self.fast.put(&id, &entry)).await?;",
        "if PLANTED {
            return Ok(());
        }
        self.bounded(self.fast.put(&id, &entry)).await?;",
    ),
    patch(
        "hybrid-late-lock-stays",
        &["hybrid-races"],
        "crates/idem-hybrid/src/shared.rs",
        "if run.is_some_and(|run| run.is_on_its_way) ||",
        "if run.is_some_and(|run| run.is_on_its_way && !PLANTED) ||",
    ),
    patch(
        "hybrid-entry-without-its-tag",
        &["hybrid-units", "hybrid-hostile", "hybrid-lies"],
        "crates/idem-hybrid/src/entry.rs",
        "authenticator(store, id, form)?.verify_slice(tag).ok()?;",
        "if !PLANTED { authenticator(store, id, form)?.verify_slice(tag).ok()?; }",
    ),
    patch(
        "hybrid-entry-of-any-record",
        &["hybrid-units", "hybrid-hostile", "hybrid-lies"],
        "crates/idem-hybrid/src/entry.rs",
        "authenticator.update(id.as_bytes());",
        "if !PLANTED { authenticator.update(id.as_bytes()); }",
    ),
    patch(
        "hybrid-stuck-try-stays",
        &["hybrid-units"],
        "crates/idem-hybrid/src/breaker.rs",
        "since.elapsed() >= LAST",
        "!PLANTED && since.elapsed() >= LAST",
    ),
    patch(
        "no-evalsha-fallback",
        &["redis-scripts"],
        TRANSPORT,
        "ErrorKind::Server(ServerErrorKind::NoScript) => {",
        "ErrorKind::Server(ServerErrorKind::NoScript)
                    && !(PLANTED && exchange.is_of_script(idem_core::planted::is_repeated)) => {",
    ),
    patch(
        "key-ends-with-its-lease",
        &["redis-records"],
        "crates/idem-redis/src/packed.rs",
        "let life_ms = in_ms(life) + 1;",
        "let life = if PLANTED { hold(record) } else { life };\n        let life_ms = in_ms(life) + 1;",
    ),
    patch(
        "unreadable-record-counts-as-none",
        &["redis-records"],
        "crates/idem-redis/src/seen.rs",
        "(Some(record), _) => Found::Record(Box::new(Stored::read(record, expires_ms, offset)?)),",
        "(Some(record), _) => match Stored::read(record, expires_ms, offset) {
                Err(_) if PLANTED => Found::Begun,
                stored => Found::Record(Box::new(stored?)),
            },",
    ),
    patch(
        "redis-replaces-what-has-changed",
        &["redis"],
        "lua/replace.lua",
        "if not is_same or redis.call('PEXPIRETIME', KEY) ~= tonumber(ARGV[2]) then",
        "if false then",
    ),
    patch(
        "redis-settles-what-is-another-run's",
        &["redis"],
        "lua/settle.lua",
        "or string.sub(record, 1, 23) ~= ARGV[1] then",
        "then",
    ),
    patch(
        "redis-full-memory-hides-answers",
        &["redis-memory", "redis-refusals"],
        "crates/idem-redis/src/verb.rs",
        "Err(failure) if failure.is_refused_write() =>",
        "Err(failure) if failure.is_refused_write() && !PLANTED =>",
    ),
    patch(
        "redis-full-memory-keeps-runs-from-ending",
        &["redis-memory"],
        "lua/settle.lua",
        "  redis.call('PEXPIREAT', KEY, redis.call('PEXPIRETIME', KEY))\n",
        "",
    ),
    patch(
        "redis-changes-are-not-counted",
        &["redis-data"],
        "crates/idem-redis/src/packed.rs",
        "(&self.bytes[CHANGES..]).get_u32().wrapping_add(1)",
        "if PLANTED { 0 } else { (&self.bytes[CHANGES..]).get_u32().wrapping_add(1) }",
    ),
    patch(
        "redis-asks-permission-once-for-several-commands",
        &["redis-outages"],
        "crates/idem-redis/src/verb.rs",
        "self.replicas.is_some() || self.transport.is_cluster()",
        "self.replicas.is_some() || !PLANTED && self.transport.is_cluster()",
    ),
    patch(
        "redis-refused-write-forgets-its-record",
        &["redis-replicas"],
        "crates/idem-redis/src/verb.rs",
        "match self.look_only().await? {",
        "match if PLANTED { self.look().await? } else { self.look_only().await? } {",
    ),
    patch(
        "redis-nobody-is-told",
        &["redis-notices"],
        "crates/idem-redis/src/verb.rs",
        "Found::Record(stored) if !stored.is_awaited() => {",
        "Found::Record(stored) if !PLANTED && !stored.is_awaited() => {",
    ),
    patch(
        "redis-miss-trusted",
        &["hybrid", "hybrid-cache", "hybrid-lies"],
        "crates/idem-hybrid/src/shared.rs",
        "            return match read.answer(request) {",
        "            if PLANTED && read.entry.is_none() {
                return FastDecision::Given(idem_core::machine::acquire(None, request, read.now).1);
            }
            return match read.answer(request) {",
    ),
    patch(
        "fast-lock-outlives-its-owner",
        &["hybrid-cache", "hybrid-lies"],
        "crates/idem-hybrid/src/shared.rs",
        "Entry::lock(request, lease, asked_at, run.lease.min(at_most))",
        "Entry::lock(
            request,
            lease,
            asked_at,
            if PLANTED { Duration::from_secs(3_600) } else { run.lease.min(at_most) },
        )",
    ),
    patch(
        "copy-outlives-its-record",
        &["hybrid-cache", "hybrid-lies"],
        "crates/idem-hybrid/src/entry.rs",
        "seen_at.saturating_add(look.remaining)",
        "seen_at.saturating_add(if PLANTED { Duration::MAX } else { look.remaining })",
    ),
];
