//! Everything that a store does.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, Purge, Settlement, StoreTransaction, TransactionalStore,
    Writes,
};
use idem_postgres::{Join, PostgresConfig, PostgresStore, PostgresTransaction, TimeOffset};
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request, retryable};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row as _};

use super::traps::Hostile;

type Done<T = ()> = Result<T, Box<dyn Error>>;

const PERIOD: Duration = Duration::from_secs(3600);

/// How a store is laid out, and what migrates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Table,
    Pooled,
    Partitions,
    /// Another tool migrates.
    Tool,
}

impl Layout {
    pub const ALL: [Self; 4] = [Self::Table, Self::Pooled, Self::Partitions, Self::Tool];

    pub fn schema(self) -> String {
        format!("idem_{self:?}").to_lowercase()
    }

    fn is_partitioned(self) -> bool {
        matches!(self, Self::Partitions | Self::Tool)
    }
}

/// Does everything that a store does, as the store's role.
pub async fn all(hostile: &Hostile, layout: Layout) -> Done {
    let (schema, offset) = (layout.schema(), TimeOffset::default());
    let config = PostgresConfig::from_options(hostile.store()).schema(&schema).time_offset(offset.clone());
    let config = match layout {
        Layout::Table => config,
        Layout::Pooled => config.through_transaction_pooler(),
        Layout::Partitions => config.partitioned(PERIOD),
        Layout::Tool => {
            migrate(hostile, &schema).await?;
            config.without_migrating()
        }
    };
    PostgresStore::open(config.clone()).await?;
    hostile.copy_functions_of(&schema).await;
    let store = PostgresStore::open(config).await?;
    serve(&store, &offset, &mut hostile.connection().await).await?;
    // The owner of the tables lacks none.
    if let Some(missing) = store.missing_privileges().await?.first() {
        return Err(missing.to_string().into());
    }
    hostile.run(&format!("SELECT * FROM {schema}.idem_records_readable")).await;
    upkeep(hostile, &store, &offset, layout).await
}

/// Serves requests in every way, and makes the store's reports. `business` is a session of the application.
pub async fn serve(store: &PostgresStore, offset: &TimeOffset, business: &mut PgConnection) -> Done {
    verbs(store, offset).await?;
    together(store).await?;
    transactions(store, offset).await?;
    guard(store, business).await?;
    join(store, business).await?;
    store.self_test().await?;
    store.health().await?;
    Ok(())
}

/// As a tool does that sends each file in a transaction.
async fn migrate(hostile: &Hostile, schema: &str) -> Done {
    let mut tool = hostile.connection().await;
    let mut files: Vec<_> = idem_postgres::migrations(schema)?.into_iter().map(|migration| migration.sql).collect();
    files.push(idem_postgres::partitioning(schema, PERIOD)?);
    let path = "SELECT pg_catalog.current_setting('search_path')";
    let before: String = sqlx::raw_sql(path).fetch_one(&mut tool).await?.try_get(0)?;
    sqlx::raw_sql(AssertSqlSafe(format!("CREATE SCHEMA {schema}"))).execute(&mut tool).await?;
    for file in files {
        let mut transaction = tool.begin().await?;
        sqlx::raw_sql(AssertSqlSafe(file)).execute(&mut *transaction).await?;
        let after: String = sqlx::raw_sql(path).fetch_one(&mut *transaction).await?.try_get(0)?;
        assert_eq!(after, before, "what else the tool does in this transaction finds its path as it was");
        transaction.commit().await?;
    }
    Ok(())
}

async fn lease(store: &PostgresStore, request: &Acquire) -> Done<Lease> {
    match store.acquire(request).await? {
        AcquireOutcome::Acquired(lease) => Ok(lease),
        other => Err(format!("not acquired: {other:?}").into()),
    }
}

async fn verbs(store: &PostgresStore, offset: &TimeOffset) -> Done {
    let first = request();
    let crashed = lease(store, &first).await?;
    store.renew(&crashed, first.term).await?;
    store.checkpoint(&crashed, &checkpoint("half")).await?;
    offset.advance(LEASE);
    let successor = lease(store, &repeat_of(&first)).await?;
    store.settle(&successor, &retryable(), KEPT).await?;
    store.settle(&crashed, &completed(), KEPT).await?;
    offset.advance(Duration::from_secs(120));
    let last = lease(store, &repeat_of(&first)).await?;
    store.settle(&last, &Settlement::Released, KEPT).await?;
    let last = lease(store, &repeat_of(&first)).await?;
    store.settle(&last, &completed(), KEPT).await?;
    store.settle(&last, &completed(), KEPT).await?;
    store.acquire(&repeat_of(&first)).await?;
    store.peek(&first.id).await?;
    let given_back = request();
    store.settle(&lease(store, &given_back).await?, &Settlement::Released, KEPT).await?;
    Ok(())
}

/// Many verbs in one statement.
async fn together(store: &PostgresStore) -> Done {
    let mut leases = Vec::new();
    for _ in 0..8 {
        let request = request();
        leases.push((lease(store, &request).await?, request));
    }
    let renew = leases.iter().map(|(lease, request)| store.renew(lease, request.term));
    let keep = leases.iter().map(|(lease, _)| async { store.checkpoint(lease, &checkpoint("half")).await });
    let settle = leases.iter().map(|(lease, _)| async { store.settle(lease, &completed(), KEPT).await });
    let again = leases.iter().map(|(_, request)| async { store.acquire(&repeat_of(request)).await });
    let (renewed, kept) = tokio::join!(futures_util::future::join_all(renew), futures_util::future::join_all(keep));
    let (ended, seen) = tokio::join!(futures_util::future::join_all(settle), futures_util::future::join_all(again));
    for outcome in renewed.into_iter().chain(kept).chain(ended) {
        outcome?;
    }
    for outcome in seen {
        outcome?;
    }
    Ok(())
}

pub fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PgConnection {
    transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap()
}

async fn transactions(store: &PostgresStore, offset: &TimeOffset) -> Done {
    let first = request();
    for (settlement, writes) in [
        (Settlement::Released, Writes::Discard),
        (retryable(), Writes::Discard),
        (retryable(), Writes::Keep),
        (completed(), Writes::Keep),
    ] {
        let Begin::Acquired { mut transaction, .. } = store.begin(&repeat_of(&first)).await? else {
            return Err("a key that is free was answered".into());
        };
        let mut nested = handlers(&mut *transaction).begin().await?;
        sqlx::query("INSERT INTO app.effects VALUES ($1)").bind(&b"paid"[..]).execute(&mut *nested).await?;
        nested.commit().await?;
        assert!(matches!(store.begin(&repeat_of(&first)).await?, Begin::Answered(AcquireOutcome::InProgress { .. })));
        transaction.finish(&settlement, KEPT, writes).await?;
        offset.advance(Duration::from_secs(120));
    }
    assert!(matches!(store.begin(&repeat_of(&first)).await?, Begin::Answered(AcquireOutcome::Replay(_))));
    Ok(())
}

async fn guard(store: &PostgresStore, business: &mut PgConnection) -> Done {
    let lease = lease(store, &request()).await?;
    let guard = store.guard(&lease);
    let insert = format!("INSERT INTO app.effects SELECT NULL WHERE {}", guard.condition());
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut *business).await?;
    sqlx::raw_sql("BEGIN").execute(&mut *business).await?;
    guard.hold(business).await?;
    sqlx::raw_sql("COMMIT").execute(business).await?;
    Ok(())
}

async fn join(store: &PostgresStore, business: &mut PgConnection) -> Done {
    for settlement in [retryable(), completed()] {
        sqlx::raw_sql("BEGIN").execute(&mut *business).await?;
        let Join::Acquired(run) = store.join(business, &request()).await? else {
            return Err("a key that is free was answered".into());
        };
        sqlx::raw_sql("INSERT INTO app.effects SELECT NULL").execute(&mut *business).await?;
        run.settle(business, &settlement, KEPT).await?;
        sqlx::raw_sql("COMMIT").execute(&mut *business).await?;
    }
    Ok(())
}

async fn upkeep(hostile: &Hostile, store: &PostgresStore, offset: &TimeOffset, layout: Layout) -> Done {
    let schema = layout.schema();
    lease(store, &request()).await?;
    offset.advance(RETENTION + KEPT + LEASE + 3 * PERIOD);
    store.purge(NonZeroU32::MIN).await?;
    let purger =
        Purger::start_with(Arc::new(store.clone()), PurgerSettings::new().longest_pause(Duration::from_millis(50)));
    // On a loaded machine partitions may take too long to make, and are then tried again after a minute.
    let (mut left, until) = (String::new(), Instant::now() + Duration::from_secs(150));
    let records = format!("SELECT count(*) FROM {schema}.idem_records");
    let partitions = format!("SELECT count(*) - 3 FROM {schema}.idem_partitions");
    loop {
        let mut found: i64 = hostile.ask(&records).await[0].get(0);
        if layout.is_partitioned() {
            found += hostile.ask(&partitions).await[0].get::<i64, _>(0).abs();
        }
        if found == 0 {
            break;
        }
        if Instant::now() > until {
            left = format!("the purger leaves {found}");
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    purger.stop().await;
    if left.is_empty() { Ok(()) } else { Err(left.into()) }
}
