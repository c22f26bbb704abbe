//! Records in partitions: no index keeps two rows from having one id, and a whole partition is dropped at once.
//!
//! Some schedules need two statements at the same moment; they are forced by locks that a referee holds.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{
    AcquireOutcome, Begin, IdempotencyStore, Inspect, Lease, OwnerOutcome, Purge, RecordCounts, RecordFilter,
    Settlement, Term, TransactionalStore, Writes,
};
use idem_postgres::{Isolation, PostgresConfig, PostgresStore, TimeOffset};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::PgConnection;

const HOUR: Duration = Duration::from_secs(3600);

fn patient(config: PostgresConfig) -> PostgresConfig {
    config.lock_timeout(Duration::from_secs(30)).statement_timeout(Duration::from_secs(30))
}

/// Waits until `count` sessions wait for a lock in a statement about the schema.
async fn until_waiting(schema: &Schema, count: i64) {
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
         AND (application_name = '{0}' OR query LIKE '%{0}%')",
        schema.name
    );
    let mut watch = connection().await;
    let reached = async {
        while number(&mut watch, waiting.clone()).await < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reached).await.expect("nobody waits");
}

/// A session that spreads the records over partitions, and has not committed.
async fn begin_partitioning(schema: &Schema) -> PgConnection {
    let mut session = connection().await;
    sql(&mut session, format!("BEGIN;{}", idem_postgres::partitioning(&schema.name, HOUR).unwrap())).await;
    session
}

async fn rows(schema: &Schema) -> i64 {
    number(&mut connection().await, format!("SELECT count(*) FROM {}.idem_records", schema.name)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_acquires_that_wait_for_the_partitioning_make_one_record() {
    let schema = Schema::new();
    let one = PostgresStore::open(patient(schema.config())).await.unwrap();
    let other = PostgresStore::open(patient(schema.config())).await.unwrap();
    let mut conversion = begin_partitioning(&schema).await;
    let first = request();
    let acquires: Vec<_> = [&one, &other]
        .into_iter()
        .map(|store| {
            let (store, request) = (store.clone(), repeat_of(&first));
            tokio::spawn(async move { store.acquire(&request).await.unwrap() })
        })
        .collect();
    until_waiting(&schema, 2).await;
    sql(&mut conversion, "COMMIT").await;
    let mut runs = 0;
    for acquire in acquires {
        runs += u32::from(matches!(acquire.await.unwrap(), AcquireOutcome::Acquired(_)));
    }
    assert_eq!((runs, rows(&schema).await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_that_waits_for_the_partitioning_gets_the_first_answer() {
    let schema = Schema::new();
    let config = patient(schema.config()).max_transactions(NonZeroU32::MIN);
    let store = PostgresStore::open(config).await.unwrap();
    let first = request();
    // The session of this run keeps the lookup prepared.
    let Begin::Acquired { transaction, .. } = store.begin(&first).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let mut conversion = begin_partitioning(&schema).await;
    let repeat = {
        let (store, request) = (store.clone(), repeat_of(&first));
        tokio::spawn(async move { store.begin(&request).await.unwrap() })
    };
    until_waiting(&schema, 1).await;
    sql(&mut conversion, "COMMIT").await;
    match repeat.await.unwrap() {
        Begin::Answered(AcquireOutcome::Replay(_)) => {}
        Begin::Answered(other) => panic!("{other:?}"),
        Begin::Acquired { .. } => panic!("it runs again"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_began_before_the_partitioning_is_settled_after_it() {
    let schema = Schema::new();
    let store = PostgresStore::open(patient(schema.config())).await.unwrap();
    let first = request();
    let Begin::Acquired { transaction, .. } = store.begin(&first).await.unwrap() else { panic!() };
    let mut conversion = begin_partitioning(&schema).await;
    let finished = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
    until_waiting(&schema, 1).await;
    sql(&mut conversion, "COMMIT").await;
    assert_eq!(finished.await.unwrap().unwrap(), OwnerOutcome::Applied);
    let repeat = store.acquire(&repeat_of(&first)).await.unwrap();
    assert!(matches!(repeat, AcquireOutcome::Replay(_)), "{repeat:?}");
    assert_eq!(rows(&schema).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_waits_for_the_partition_that_another_session_makes_for_it() {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = patient(schema.config()).partitioned(HOUR).time_offset(offset.clone());
    let store = PostgresStore::open(config).await.unwrap();
    // No partition has been made for this time.
    offset.advance(5 * HOUR);
    let Begin::Acquired { transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    let mut other = connection().await;
    sql(&mut other, format!("BEGIN;SELECT {}.idem_make_partitions_v1({})", schema.name, offset.micros())).await;
    let finished = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
    until_waiting(&schema, 1).await;
    sql(&mut other, "COMMIT").await;
    assert_eq!(finished.await.unwrap().unwrap(), OwnerOutcome::Applied);
    assert_eq!(rows(&schema).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_that_has_looked_waits_for_a_transaction_that_commits() {
    let schema = Schema::new();
    let store = PostgresStore::open(patient(schema.config()).partitioned(HOUR)).await.unwrap();
    let first = request();
    // A trigger holds the transaction up between its record and its commit.
    let mut referee = connection().await;
    let gate = format!(
        "CREATE FUNCTION {0}.gate() RETURNS TRIGGER LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_advisory_xact_lock(77001); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON {0}.idem_records_first DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW WHEN (NEW.state = 2) EXECUTE FUNCTION {0}.gate();
         SELECT pg_advisory_lock(77001)",
        schema.name
    );
    sql(&mut referee, gate).await;
    let Begin::Acquired { transaction, .. } = store.begin(&first).await.unwrap() else { panic!() };
    let finished = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap() });
    until_waiting(&schema, 1).await;
    let leased = {
        let (store, request) = (store.clone(), repeat_of(&first));
        tokio::spawn(async move { store.acquire(&request).await.unwrap() })
    };
    until_waiting(&schema, 2).await;
    sql(&mut referee, "SELECT pg_advisory_unlock(77001)").await;
    assert_eq!(finished.await.unwrap(), OwnerOutcome::Applied);
    let leased = leased.await.unwrap();
    assert!(matches!(leased, AcquireOutcome::Replay(_)), "{leased:?}");
    assert_eq!(rows(&schema).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_goes_on_when_a_key_is_used_again_whose_row_it_was_about_to_remove() {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = patient(schema.config()).partitioned(HOUR).time_offset(offset.clone());
    let store = PostgresStore::open(config).await.unwrap();
    let [first, second] = [request(), request()];
    for request in [&first, &second] {
        let AcquireOutcome::Acquired(lease) = store.acquire(request).await.unwrap() else { panic!() };
        assert_eq!(store.settle(&lease, &completed(), HOUR).await.unwrap(), OwnerOutcome::Applied);
    }
    offset.advance(3 * HOUR);
    // A trigger holds the purge up when it has removed the first row, and has not come to the second.
    let mut referee = connection().await;
    let gate = format!(
        "CREATE FUNCTION {0}.gate() RETURNS TRIGGER LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_advisory_xact_lock(77003); RETURN OLD; END';
         CREATE TRIGGER gate BEFORE DELETE ON {0}.idem_records_first
             FOR EACH ROW WHEN (OLD.id = '\\x{1}') EXECUTE FUNCTION {0}.gate();
         SELECT pg_advisory_lock(77003)",
        schema.name, first.id
    );
    sql(&mut referee, gate).await;
    let purge = {
        let store = store.clone();
        tokio::spawn(async move { store.purge(10.try_into().unwrap()).await })
    };
    until_waiting(&schema, 1).await;
    // The row moves to the current partition.
    let again = store.acquire(&repeat_of(&second)).await.unwrap();
    assert!(matches!(again, AcquireOutcome::Acquired(_)), "{again:?}");
    sql(&mut referee, "SELECT pg_advisory_unlock(77003)").await;
    assert_eq!(purge.await.unwrap().unwrap(), 1);
    assert_eq!(rows(&schema).await, 1);
}

#[tokio::test]
async fn a_record_that_is_extended_at_its_last_moment_keeps_its_partition() {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = schema.config().partitioned(HOUR).time_offset(offset.clone());
    let store = PostgresStore::open(config).await.unwrap();
    let short = Term { lease: Duration::from_secs(1), retention: HOUR };
    let first = idem_core::Acquire { term: short, ..request() };
    let AcquireOutcome::Acquired(Lease { .. }) = store.acquire(&first).await.unwrap() else { panic!() };
    // Its time is over for a statement that begins now; one that began a moment ago may be about to extend it.
    offset.advance(HOUR + Duration::from_secs(20));
    let past = format!("SELECT ({0}.idem_past_partition_v1({1}) IS NOT NULL)::INT::INT8", schema.name, {
        i64::try_from((HOUR + Duration::from_secs(20)).as_micros()).unwrap()
    });
    assert_eq!(number(&mut connection().await, past).await, 0);
    // An hour in a partition ends within the next hour, and a minute later it is dropped.
    offset.advance(HOUR + Duration::from_secs(60));
    let purger = Purger::start_with(Arc::new(store), PurgerSettings::new().longest_pause(Duration::from_millis(50)));
    let dropped = async {
        while rows(&schema).await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), dropped).await.expect("it is never dropped");
    purger.stop().await;
}

/// The process was stopped for long between its decision and the statement that writes it.
#[tokio::test]
async fn a_decision_is_not_written_if_its_record_has_expired_since() {
    let schema = Schema::new();
    let store = PostgresStore::open(schema.config()).await.unwrap();
    let AcquireOutcome::Acquired(_) = store.acquire(&request()).await.unwrap() else { panic!("new") };
    let mut connection = connection().await;
    // The decision changes nothing but the end of the record.
    let mut replace = async |skew: i64, created_at: &str| {
        let name = &schema.name;
        let sql = format!(
            "SELECT {name}.idem_replace_v1(
                {skew}, id, NULL, xmin::TEXT::BIGINT, format, fingerprint_algorithm, fingerprint, owner, attempt, state,
                acquisition, takeover, lease_until, not_before, checkpoint_name, checkpoint_data, status, headers, body,
                {created_at}, updated_at, expires_at + 1, purge_after
            )::BIGINT FROM {name}.idem_records"
        );
        number(&mut connection, sql).await
    };
    let long = i64::try_from((HOUR * 1000).as_micros()).unwrap();
    assert_eq!(replace(long, "created_at").await, 2, "changed");
    assert_eq!(replace(0, "created_at").await, 1, "done");
    assert_eq!(replace(long, "created_at + 1").await, 1, "begun anew");
}

#[tokio::test]
async fn a_purger_that_comes_after_a_long_time_makes_no_partitions_of_the_past() {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = schema.config().partitioned(Duration::from_secs(60)).time_offset(offset.clone());
    let store = PostgresStore::open(config).await.unwrap();
    offset.advance(Duration::from_secs(90 * 24 * 3600));
    let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
    store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    let purger =
        Purger::start_with(Arc::new(store.clone()), PurgerSettings::new().longest_pause(Duration::from_millis(50)));
    let partitions = format!("SELECT count(*) FROM {}.idem_partitions WHERE name <> 'idem_records_first'", schema.name);
    let made = async {
        while number(&mut connection().await, partitions.clone()).await < 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), made).await.expect("no partitions are made");
    assert!(number(&mut connection().await, partitions).await <= 4);
    purger.stop().await;
}

#[tokio::test]
async fn a_partition_that_goes_under_a_transaction_that_runs_an_expired_record_anew_does_not_undo_it() {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead] {
        let (schema, offset) = (Schema::new(), TimeOffset::default());
        let config = patient(schema.config()).partitioned(HOUR).time_offset(offset.clone()).isolation(isolation);
        let store = PostgresStore::open(config).await.unwrap();
        let old = idem_core::Acquire { term: Term { lease: HOUR, retention: HOUR }, ..request() };
        let AcquireOutcome::Acquired(lease) = store.acquire(&old).await.unwrap() else { panic!() };
        assert_eq!(store.settle(&lease, &completed(), HOUR).await.unwrap(), OwnerOutcome::Applied);
        offset.advance(3 * HOUR);
        let Begin::Acquired { lease, transaction, .. } = store.begin(&repeat_of(&old)).await.unwrap() else { panic!() };
        assert_eq!(lease.attempt, 1);
        let purger =
            Purger::start_with(Arc::new(store.clone()), PurgerSettings::new().longest_pause(Duration::from_millis(50)));
        let first =
            format!("SELECT count(*) FROM pg_class WHERE oid = to_regclass('{}.idem_records_first')", schema.name);
        let mut watch = connection().await;
        let dropped = async {
            while number(&mut watch, first.clone()).await > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), dropped).await.expect("the transaction keeps the partition");
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert!(matches!(store.acquire(&repeat_of(&old)).await.unwrap(), AcquireOutcome::Replay(_)));
        assert_eq!(rows(&schema).await, 1);
        purger.stop().await;
    }
}

/// Partitions have rows at the same places, so a part of a scan can end between two of them.
#[tokio::test]
async fn a_scan_has_each_row_of_a_place_that_two_partitions_have() {
    const EACH: usize = 4;
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = schema.config().partitioned(HOUR).time_offset(offset.clone());
    let store = PostgresStore::open(config).await.unwrap();
    let mut expected = Vec::new();
    for _ in 0..2 {
        for _ in 0..EACH {
            let request = idem_core::Acquire { term: Term { lease: HOUR, retention: 24 * HOUR }, ..request() };
            assert!(matches!(store.acquire(&request).await.unwrap(), AcquireOutcome::Acquired(_)));
            expected.push(request.id);
        }
        offset.advance(3 * HOUR);
    }
    expected.sort_unstable();
    let shared = format!(
        "SELECT count(*) FROM (SELECT FROM {}.idem_records GROUP BY ctid HAVING count(DISTINCT tableoid) = 2) AS shared",
        schema.name
    );
    assert_eq!(number(&mut connection().await, shared).await, i64::try_from(EACH).unwrap());
    for limit in 1..=2 * EACH {
        let limit = NonZeroU32::new(u32::try_from(limit).unwrap()).unwrap();
        let (mut listed, mut from) = (Vec::new(), None);
        loop {
            let page = store.list(&RecordFilter::default(), from.as_ref(), limit).await.unwrap();
            listed.extend(page.records.iter().map(|record| record.id));
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        listed.sort_unstable();
        assert_eq!(listed, expected, "parts of {limit}");
        let (mut counts, mut from) = (RecordCounts::default(), None);
        loop {
            let page = store.count(from.as_ref(), limit).await.unwrap();
            counts.merge(&page.counts);
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        assert_eq!(counts.scanned(), expected.len() as u64, "parts of {limit}");
    }
}
