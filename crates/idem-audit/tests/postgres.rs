//! The table of decisions in a real Postgres.
#![cfg(feature = "postgres")]

use std::error::Error;
use std::future::ready;
use std::num::NonZeroUsize;
use std::sync::{Arc, mpsc};

use async_trait::async_trait;
use idem_audit::{AuditEntry, AuditObserver, AuditSink, PostgresAuditSink};
use idem_core::engine::{Conclusion, Context, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, MemoryStore, Scope, StoredResponse, TraceParent, Writes};
use idem_schemas::Schema;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Writes each batch twice, as a writer does whose first answer was lost.
#[derive(Debug)]
struct Twice(PostgresAuditSink);

#[async_trait]
impl AuditSink for Twice {
    async fn write(&self, batch: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.0.write(batch, entries).await?;
        self.0.write(batch, entries).await
    }
}

fn done() -> Conclusion<()> {
    let response = StoredResponse::new(201, "");
    Conclusion { value: (), disposition: Disposition::Complete { response, writes: Writes::Keep }, retention: None }
}

type Row = (Option<String>, String, Option<Vec<u8>>, String, Option<String>, bool);

#[tokio::test]
async fn each_decision_is_a_row_without_the_key() {
    let schema = Schema::new();
    let pool = PgPool::connect(&idem_servers::postgres_url()).await.unwrap();
    // Several replicas start at once.
    let open = || PostgresAuditSink::open(pool.clone(), &schema.name);
    let (sink, again) = tokio::join!(open(), open());
    again.unwrap();
    let (audit, writer) = AuditObserver::with_writer(NonZeroUsize::new(100).unwrap(), Arc::new(Twice(sink.unwrap())));
    let store = Arc::new(MemoryStore::new(NonZeroUsize::new(100).unwrap()));
    let engine = Idempotency::at_least_once(store, Settings::new().observer(Arc::new(audit.clone())));
    let trace: TraceParent = TRACE.parse().unwrap();
    let operation = |input: &[u8]| {
        let scope = Scope::new("a\0cme", "POST /p");
        Operation::new(scope, "secret-key".parse().unwrap(), Fingerprint::of_bytes("", input)).trace(Some(trace))
    };
    let (tell, ids) = mpsc::channel();
    for input in [b"1", b"1", b"2"] {
        let tell = tell.clone();
        let handler = move |context: Context| async move {
            tell.send(*context.record_id()).unwrap();
            done()
        };
        let _ = engine.execute(operation(input), handler, done).await;
    }
    let id = ids.recv().unwrap();
    engine.refused("POST /p", "key-missing");
    writer.run_until(ready(())).await;
    assert_eq!((audit.written(), audit.dropped()), (4, 0));
    let rows = format!(
        "SELECT principal, operation, record, outcome, trace,
             decided_at BETWEEN now() - interval '5 min' AND now() + interval '5 min'
         FROM \"{}\".idem_audit ORDER BY place",
        schema.name
    );
    let rows: Vec<Row> = sqlx::query_as(AssertSqlSafe(rows)).fetch_all(&pool).await.unwrap();
    let row = |outcome: &str| {
        let record = Some(id.as_bytes().to_vec());
        (
            Some("a\u{FFFD}cme".to_owned()),
            "POST /p".to_owned(),
            record,
            outcome.to_owned(),
            Some(TRACE.to_owned()),
            true,
        )
    };
    let refused = (None, "POST /p".to_owned(), None, "key-missing".to_owned(), None, true);
    assert_eq!(rows, [row("executed"), row("replayed"), row("mismatch"), refused]);
    let with_key =
        format!("SELECT count(*) FROM \"{0}\".idem_audit WHERE idem_audit::text LIKE '%secret%'", schema.name);
    let with_key: i64 = sqlx::query_scalar(AssertSqlSafe(with_key)).fetch_one(&pool).await.unwrap();
    assert_eq!(with_key, 0);
}

#[tokio::test]
async fn a_table_that_cannot_be_written_is_refused_at_the_start() {
    let schema = Schema::new();
    let pool = PgPool::connect(&idem_servers::postgres_url()).await.unwrap();
    PostgresAuditSink::open(pool.clone(), &schema.name).await.unwrap();
    let role = format!("{}_reader", schema.name);
    let run = |sql: String| sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool);
    let grant = format!(
        "CREATE ROLE \"{role}\"; GRANT USAGE ON SCHEMA \"{0}\" TO \"{role}\"; GRANT SELECT ON \"{0}\".idem_audit TO \"{role}\"",
        schema.name
    );
    run(grant).await.unwrap();
    let as_reader = PgPoolOptions::new().max_connections(1).connect(&idem_servers::postgres_url()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("SET ROLE \"{role}\""))).execute(&as_reader).await.unwrap();
    let reader = PostgresAuditSink::open(as_reader.clone(), &schema.name).await;
    as_reader.close().await;
    run(format!("DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\"")).await.unwrap();
    assert!(reader.unwrap_err().to_string().contains("INSERT"));
    run(format!("COMMENT ON TABLE \"{}\".idem_audit IS 'idem-audit 2'", schema.name)).await.unwrap();
    let other = PostgresAuditSink::open(pool.clone(), &schema.name).await.unwrap_err().to_string();
    assert!(other.contains("`idem-audit 2`"), "{other}");
}

#[tokio::test]
async fn an_error_of_the_statement_is_permanent_and_one_of_the_connection_is_not() {
    let schema = Schema::new();
    let pool = PgPool::connect(&idem_servers::postgres_url()).await.unwrap();
    let sink = PostgresAuditSink::open(pool.clone(), &schema.name).await.unwrap();
    let drop = format!("DROP TABLE \"{}\".idem_audit", schema.name);
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&pool).await.unwrap();
    let missing = sink.write(Uuid::new_v4(), &[]).await.unwrap_err();
    assert!(sink.is_permanent(&*missing), "{missing}");
    pool.close().await;
    let away = sink.write(Uuid::new_v4(), &[]).await.unwrap_err();
    assert!(!sink.is_permanent(&*away), "{away}");
}
