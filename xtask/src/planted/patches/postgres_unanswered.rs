//! Bugs around writes without an answer, in idem-postgres.

use super::{Patch, patch};

const BATCHER: &str = "crates/idem-postgres/src/batch/batcher.rs";
const UNANSWERED: &str = "crates/idem-postgres/src/connect/unanswered.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "commit-without-an-answer-frees-its-place",
        &["postgres-standby"],
        "crates/idem-postgres/src/transaction/handler_transaction.rs",
        "session.close_when_answered();",
        "if PLANTED {
                session.close_now();
            } else {
                session.close_when_answered();
            }",
    ),
    patch(
        "writes-go-on-without-answers",
        &["postgres-standby", "postgres-unanswered"],
        BATCHER,
        "workers.saturating_mul(MOST_UNANSWERED)",
        "workers.saturating_mul(if PLANTED { 99 } else { MOST_UNANSWERED })",
    ),
    patch(
        "worker-without-permits-refuses-for-all",
        &["postgres-unanswered"],
        BATCHER,
        "let permits = Arc::clone(&permits);",
        "let permits = if PLANTED { Arc::new(Semaphore::new(MOST_UNANSWERED)) } else { Arc::clone(&permits) };",
    ),
    patch(
        "standby-is-never-awaited",
        &["postgres-standby", "postgres-unanswered"],
        UNANSWERED,
        "left.retain(|session| busy.contains(session));",
        "left.retain(|session| busy.contains(session) && !PLANTED);",
    ),
    patch(
        "silences-keep-writes-waiting",
        &["postgres-unanswered"],
        UNANSWERED,
        "sleep(pause).await;",
        "sleep(if PLANTED { LONGEST_PAUSE } else { pause }).await;",
    ),
    patch(
        "silence-keeps-its-place",
        &["postgres-lost"],
        UNANSWERED,
        "() = self.no_session_waits() => {}",
        "() = async {
                self.no_session_waits().await;
                if PLANTED {
                    std::future::pending::<()>().await;
                }
            } => {}",
    ),
    patch(
        "reset-connection-frees-its-place",
        &["postgres-unanswered"],
        UNANSWERED,
        "is_none_or(|error| !may_be_done(&error))",
        "is_none_or(|error| PLANTED || !may_be_done(&error))",
    ),
    patch(
        "error-of-a-pooler-frees-a-place",
        &["postgres-unanswered"],
        UNANSWERED,
        "connection.ping().await.err()",
        "connection.ping().await.err().filter(|error| !PLANTED || !matches!(error, sqlx::Error::Database(_)))",
    ),
    patch(
        "only-known-waits-count",
        &["postgres-unanswered"],
        UNANSWERED,
        "format!(\"{BEGIN}{BUSY_SESSIONS}\")",
        "format!(\"{BEGIN}{}\", BUSY_SESSIONS.replace(if PLANTED { \"'active'\" } else { \"\\0\" }, \"''\"))",
    ),
    patch(
        "permit-comes-back-after-the-answers",
        &["postgres-unanswered"],
        BATCHER,
        "callers' next verbs.
                self.permit = None;",
        "callers' next verbs.
                if !PLANTED {
                    self.permit = None;
                }",
    ),
];
