//! The suites, reduced to what takes seconds.

/// Some tests of one binary.
pub(super) struct Suite {
    pub(super) name: &'static str,
    /// The package, whose folder has the same name.
    pub(super) package: &'static str,
    pub(super) target: Target,
    /// Tests whose names contain one of these, or equal one after `--exact`; empty for all tests.
    pub(super) filters: &'static [&'static str],
}

/// The place of the tests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// In the library, next to the code.
    Library,
    /// In this integration test of the package.
    Test(&'static str),
}

impl Target {
    /// The name of the integration test, if it is one.
    pub(super) fn test(self) -> Option<&'static str> {
        match self {
            Self::Library => None,
            Self::Test(name) => Some(name),
        }
    }
}

use Target::{Library, Test};

const fn suite(name: &'static str, package: &'static str, target: Target, filters: &'static [&'static str]) -> Suite {
    Suite { name, package, target, filters }
}

/// The whole system on one store: crashes, clients that leave, and an unavailable store.
const SYSTEM: &[&str] = &[
    "crashes::transactional_axum_on_sqlite::",
    "crashes::axum_on_sqlite::a_process_that_dies",
    "disconnects::axum_on_sqlite::",
    "away::a_store_that_does_not_answer",
];

/// All suites, quick ones first.
pub(super) const SUITES: &[Suite] = &[
    suite("machine", "idem-core", Library, &["machine::"]),
    suite("identity", "idem-core", Library, &["record_id::"]),
    suite("fingerprint", "idem-core", Library, &["fingerprint::"]),
    suite("engine", "idem-core", Test("engine"), &[]),
    suite("steps", "idem-core", Test("engine"), &["steps::"]),
    suite("engine-parts", "idem-core", Library, &["engine::"]),
    suite("memory", "idem-testkit", Test("suite"), &["memory::"]),
    suite("http", "idem-http", Library, &[]),
    suite("axum", "idem-axum", Test("layer"), &[]),
    suite("tower", "idem-tower", Test("hyper"), &[]),
    suite("actix", "idem-actix", Test("layer"), &[]),
    suite("encryption", "idem-encryption", Test("store"), &["binding::"]),
    suite("console", "idem-console", Test("console"), &["attacks::"]),
    suite("audit", "idem-audit", Test("audit"), &[]),
    suite("sqlite-erasing", "idem-sqlite", Test("store"), &["erasing::"]),
    suite("sqlite-engine", "idem-sqlite", Test("store"), &["engine::"]),
    suite("sqlite-transactions", "idem-sqlite", Test("store"), &["transactions::"]),
    suite("sqlite-steps", "idem-sqlite", Test("store"), &["steps::"]),
    suite("sqlite-shadows", "idem-sqlite", Test("store"), &["shadows::"]),
    suite("sqlite-tasks", "idem-sqlite", Test("store"), &["tasks::"]),
    suite("sqlite-outages", "idem-sqlite", Test("store"), &["outages::"]),
    suite("sqlite-from-pool", "idem-sqlite", Test("store"), &["from_pool::"]),
    suite("postgres", "idem-postgres", Test("store"), &["conformance::on_a_read_committed_session::"]),
    suite("postgres-races", "idem-postgres", Test("store"), &["races::"]),
    suite("postgres-inspecting", "idem-postgres", Test("store"), &["conformance::inspecting_on_a_session::"]),
    suite("postgres-resolving", "idem-postgres", Test("store"), &["resolving::an_operation_that_a_transaction"]),
    suite(
        "postgres-roles",
        "idem-postgres",
        Test("store"),
        &["roles::layout::", "roles::locks::", "roles::qualified::"],
    ),
    suite("postgres-hostile-role", "idem-postgres", Test("store"), &["roles::hostile::"]),
    suite("postgres-from-pool", "idem-postgres", Test("store"), &["from_pool::"]),
    suite("postgres-join", "idem-postgres", Test("store"), &["join::"]),
    suite("postgres-settle-run", "idem-postgres", Test("store"), &["settle_run::"]),
    suite("postgres-steps", "idem-postgres", Test("store"), &["steps::"]),
    suite("postgres-guard", "idem-postgres", Test("store"), &["guard::"]),
    suite(
        "postgres-transactions",
        "idem-postgres",
        Test("store"),
        &[
            "transactions::a_transaction_that_took_over",
            "transactions::a_takeover_that_commits",
            "transactions::a_connection_serves",
            "transactions::when_handlers_have_all",
        ],
    ),
    suite("postgres-savepoints", "idem-postgres", Test("store"), &["savepoints::"]),
    suite(
        "postgres-hostile",
        "idem-postgres",
        Test("store"),
        &["hostile::a_handler_that_resets", "hostile::a_handler_may_take_the_role_of_a_tenant"],
    ),
    suite("postgres-batch-workers", "idem-postgres", Test("store"), &["batch_workers::"]),
    suite("postgres-partitions", "idem-postgres", Test("store"), &["partitions::"]),
    suite("postgres-purge", "idem-postgres", Test("store"), &["purge::a_batch_that_takes", "purge::while_partitions"]),
    suite("postgres-sessions", "idem-postgres", Test("store"), &["faults::sessions::"]),
    suite("postgres-mixed-up", "idem-postgres", Test("store"), &["faults::mixed_up::"]),
    suite("postgres-refusals", "idem-postgres", Test("store"), &["faults::refusals::"]),
    suite(
        "postgres-sweep",
        "idem-postgres",
        Test("store"),
        &["--exact", "sweep::transactions_dropped_at_every_await_leave_all_or_nothing"],
    ),
    suite("postgres-standby", "idem-postgres", Test("store"), &["faults::standby::"]),
    suite("postgres-unanswered", "idem-postgres", Test("store"), &["faults::unanswered::"]),
    suite(
        "postgres-lost",
        "idem-postgres",
        Test("store"),
        &[
            "faults::lost_answers::an_answer_lost_with_the_server",
            "an_error_of_a_poolers_own",
            "a_commit_whose_answer_never",
        ],
    ),
    suite(
        "redis",
        "idem-redis",
        Test("store"),
        &["conformance::on_one_server", "conformance::the_store_follows_the_model_on_one_server"],
    ),
    suite("redis-scripts", "idem-redis", Test("store"), &["scripts::"]),
    suite("redis-records", "idem-redis", Test("store"), &["hostile::", "expiry::"]),
    suite("redis-pool", "idem-redis", Test("store"), &["pool::an_operation", "pool::a_"]),
    suite("redis-connecting", "idem-redis", Test("store"), &["connecting::", "notices::a_subscription_whose"]),
    suite("redis-refusals", "idem-redis", Test("store"), &["refusals::"]),
    suite("redis-data", "idem-redis", Test("store"), &["data::no_two_versions"]),
    suite("redis-outages", "idem-redis", Test("store"), &["outages::keys_on_both_sides"]),
    suite("redis-replicas", "idem-redis", Test("store"), &["replicas::a_server_that_lacks"]),
    suite("redis-memory", "idem-redis", Test("store"), &["opening::a_full_server"]),
    suite("redis-fast", "idem-redis", Test("store"), &["fast::ends_are_told"]),
    suite("redis-notices", "idem-redis", Test("store"), &["notices::settlements_are_told"]),
    suite("hybrid-units", "idem-hybrid", Library, &[]),
    suite("hybrid-races", "idem-hybrid", Test("store"), &["races::"]),
    suite("hybrid-hostile", "idem-hybrid", Test("store"), &["hostile::"]),
    suite(
        "hybrid",
        "idem-hybrid",
        Test("store"),
        &["conformance::memory_in_front_of_memory", "conformance::the_store_follows_the_model_in_memory"],
    ),
    suite("hybrid-transactions", "idem-hybrid", Test("store"), &["transactions::a_run_that_its_handler_settled"]),
    suite("hybrid-cache", "idem-hybrid", Test("store"), &["cache::"]),
    suite("hybrid-lies", "idem-hybrid", Test("store"), &["lies::"]),
    suite("hybrid-erasing", "idem-hybrid", Test("store"), &["erasing::"]),
    suite("mysql", "idem-mysql", Test("store"), &["conformance::"]),
    suite("mysql-concurrency", "idem-mysql", Test("store"), &["concurrency::"]),
    suite("mysql-batches", "idem-mysql", Test("store"), &["batches::"]),
    suite(
        "mysql-transactions",
        "idem-mysql",
        Test("store"),
        &[
            "transactions::a_handler_that_ends",
            "transactions::settings_of",
            "transactions::a_dropped_transaction_leaves",
        ],
    ),
    suite("mysql-cuts", "idem-mysql", Test("store"), &["cuts::"]),
    suite("mysql-within", "idem-mysql", Test("store"), &["within::"]),
    suite(
        "jobs",
        "idem-jobs",
        Test("jobs"),
        &["working::sqlite::", "losing::sqlite::", "deadlines::sqlite::", "api::sqlite::"],
    ),
    suite("jobs-sqlite", "idem-jobs", Test("jobs"), &["queues::sqlite::"]),
    suite(
        "jobs-postgres",
        "idem-jobs",
        Test("jobs"),
        &["queues::postgres::", "queues::a_job_that_another", "api::postgres::", "losing::postgres::a_run_that"],
    ),
    suite("jobs-redis", "idem-jobs", Test("jobs"), &["queues::redis::", "queues::damaged"]),
    suite(
        "inbox",
        "idem-inbox",
        Test("inbox"),
        &["handling::sqlite::", "handling::an_inbox", "losing::sqlite::", "parking::sqlite::"],
    ),
    suite("inbox-kafka", "idem-inbox", Test("inbox"), &["kafka::"]),
    suite("inbox-nats", "idem-inbox", Test("inbox"), &["nats::"]),
    suite("inbox-rabbitmq", "idem-inbox", Test("inbox"), &["rabbitmq::attempts", "rabbitmq::no_timestamp"]),
    suite("inbox-redis", "idem-inbox", Test("inbox"), &["redis::messages_are", "redis::a_field"]),
    suite(
        "outbox",
        "idem-outbox",
        Test("outbox"),
        &["publishing::sqlite::", "publishing::a_message", "relaying::sqlite::a_refused", "relaying::sqlite::refused"],
    ),
    suite("outbox-brokers", "idem-outbox", Test("outbox"), &["brokers::"]),
    suite("outbox-postgres", "idem-outbox", Test("outbox"), &["relaying::postgres::of_two"]),
    suite("system", "payments", Test("system"), SYSTEM),
    suite("clients", "payments", Test("system"), &["slow_clients::", "::strangers_learn"]),
    suite("bodies", "payments", Test("system"), &["bodies::"]),
    suite("sockets", "payments", Test("http"), &["memory"]),
];
