//! `scheduled`: pg_cron removes expired records, as the documentation of the command line says.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, IdempotencyStore as _, Inspect as _, OwnerToken, Settlement, StoredResponse};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_testkit::fixture::{fresh_id, request};

use crate::Error;
use crate::database::Database;
use crate::report::{Passed, Report};

/// The page whose statement is run.
const PAGE: &str = include_str!("../../../crates/idem-cli/README.md");

/// The retention of the records that expire.
const RETENTION: Duration = Duration::from_secs(1);

/// The schedule runs each minute.
const PATIENCE: Duration = Duration::from_secs(150);

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many records expire.
    #[arg(long, default_value_t = 1_000)]
    records: u64,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    // It needs Debian's package postgresql-15-cron, or that of the version of the server.
    let settings = ["shared_preload_libraries=pg_cron", "cron.use_background_workers=on"];
    let mut database = Database::start(&settings).await?;
    let mut report = Report::new("scheduled", database.version());
    let store = PostgresStore::open(PostgresConfig::new(database.url())).await?;
    for _ in 0..options.records {
        settle(&store, RETENTION).await?;
    }
    let kept = settle(&store, Duration::from_secs(3_600)).await?;
    let running = request();
    expect_lease(store.acquire(&running).await?)?;
    database.run("CREATE EXTENSION pg_cron").await?;
    database.run(schedule()?).await?;
    let began = Instant::now();
    let left = loop {
        let left = store.count(None, NonZeroU32::MAX).await?.counts.scanned();
        if left == 2 || began.elapsed() > PATIENCE {
            break left;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    report.fact("records_left", left);
    report.fact("seconds", began.elapsed().as_secs());
    report.expect(left == 2, "expired records were not removed, or others were");
    report.expect(store.peek(&kept).await?.is_some(), "a record was removed before its time");
    report.expect(store.peek(&running.id).await?.is_some(), "a running operation lost its record");
    let ended = "SELECT count(*) FROM cron.job_run_details WHERE status = 'succeeded'";
    report.expect(database.number(ended).await? > 0, "pg_cron reports no run that succeeded");
    Ok(report.finish())
}

async fn settle(store: &PostgresStore, retention: Duration) -> Result<idem_core::RecordId, Error> {
    let request = idem_core::Acquire { id: fresh_id(), owner: OwnerToken::random(), ..request() };
    let lease = expect_lease(store.acquire(&request).await?)?;
    store.settle(&lease, &Settlement::Completed(StoredResponse::new(201, "paid")), retention).await?;
    Ok(request.id)
}

fn expect_lease(outcome: AcquireOutcome) -> Result<idem_core::Lease, Error> {
    match outcome {
        AcquireOutcome::Acquired(lease) => Ok(lease),
        outcome => Err(format!("no lease: {outcome:?}").into()),
    }
}

/// The statement of the page that schedules the purge.
fn schedule() -> Result<&'static str, Error> {
    let begin = PAGE.find("SELECT cron.schedule(").ok_or("the page has no schedule")?;
    let end = PAGE[begin..].find(';').ok_or("the statement of the page does not end")?;
    Ok(&PAGE[begin..=begin + end])
}
