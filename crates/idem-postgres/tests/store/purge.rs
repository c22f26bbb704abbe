//! Expired records are removed, row by row or a partition at a time, and no others.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, Purge, Term, TransactionalStore, Writes,
};
use idem_postgres::{PostgresConfig, PostgresStore, TimeOffset};
use idem_testkit::fixture::{completed, repeat_of, request};

const LEASE: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3600);

struct Setup {
    schema: Schema,
    offset: TimeOffset,
    store: PostgresStore,
}

async fn setup(configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> Setup {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let store = PostgresStore::open(configure(schema.config()).time_offset(offset.clone())).await.unwrap();
    Setup { schema, offset, store }
}

fn kept_for(retention: Duration) -> Acquire {
    Acquire { term: Term { lease: LEASE, retention }, ..request() }
}

async fn lease(store: &PostgresStore, request: &Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

impl Setup {
    async fn settled(&self, retention: Duration) -> Acquire {
        let request = kept_for(retention);
        let lease = lease(&self.store, &request).await;
        assert_eq!(self.store.settle(&lease, &completed(), retention).await.unwrap(), OwnerOutcome::Applied);
        request
    }

    async fn count(&self, of: &str) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.{of}", self.schema.name)).await
    }

    async fn until_count(&self, of: &str, expected: impl Fn(i64) -> bool) -> i64 {
        let reached = async {
            loop {
                let count = self.count(of).await;
                if expected(count) {
                    return count;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), reached).await.expect("the purger does not get there")
    }

    fn purger(&self) -> Purger {
        let settings = PurgerSettings::new().batch(50.try_into().unwrap()).longest_pause(Duration::from_millis(50));
        Purger::start_with(Arc::new(self.store.clone()), settings)
    }
}

#[tokio::test]
async fn rows_that_live_longer_than_was_thought_are_not_looked_at_again_and_again() {
    let setup = setup(|config| config).await;
    let request = kept_for(HOUR);
    let owner = lease(&setup.store, &request).await;
    setup.store.settle(&owner, &completed(), 24 * HOUR).await.unwrap();
    setup.offset.advance(HOUR);
    assert_eq!(setup.store.purge(10.try_into().unwrap()).await.unwrap(), 0);
    assert_eq!(setup.count("idem_records WHERE purge_after < expires_at").await, 0, "its later end is noted");
    setup.offset.advance(23 * HOUR);
    assert_eq!(setup.store.purge(10.try_into().unwrap()).await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_purges_at_once_share_the_work() {
    let setup = Arc::new(setup(|config| config.max_transactions(8.try_into().unwrap())).await);
    for _ in 0..20 {
        futures(20, |_| setup.settled(HOUR)).await;
    }
    let kept = setup.settled(3 * HOUR).await;
    setup.offset.advance(2 * HOUR);
    let mut removed = 0;
    while setup.count("idem_records").await > 1 {
        removed += futures(8, |_| async { setup.store.purge(50.try_into().unwrap()).await.unwrap() })
            .await
            .iter()
            .sum::<u32>();
    }
    assert_eq!(removed, 400, "each row is removed once");
    assert!(setup.store.peek(&kept.id).await.unwrap().is_some());
}

/// Each row takes a tenth of a second, as one with a large answer does on a slow disk.
#[tokio::test]
async fn a_batch_that_takes_longer_than_a_statement_may_last_is_halved() {
    let setup = setup(|config| config.statement_timeout(Duration::from_millis(500))).await;
    futures(20, |_| setup.settled(HOUR)).await;
    let name = &setup.schema.name;
    let slow = format!(
        "CREATE FUNCTION {name}.slow() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN PERFORM pg_catalog.pg_sleep(0.1); RETURN OLD; END $$;
         CREATE TRIGGER slow BEFORE DELETE ON {name}.idem_records FOR EACH ROW EXECUTE FUNCTION {name}.slow()"
    );
    sql(&mut connection().await, slow).await;
    setup.offset.advance(HOUR + Duration::from_secs(10));
    setup.store.purge(20.try_into().unwrap()).await.unwrap_err();
    let purger = setup.purger();
    setup.until_count("idem_records", |records| records == 0).await;
    purger.stop().await;
}

#[tokio::test]
async fn purgers_of_many_replicas_remove_what_is_over_and_stop_when_told() {
    let setup = setup(|config| config).await;
    for _ in 0..10 {
        futures(20, |_| setup.settled(HOUR)).await;
    }
    let running = kept_for(HOUR);
    let owner = lease(&setup.store, &running).await;
    let purgers = [setup.purger(), setup.purger(), setup.purger()];
    assert_eq!(setup.count("idem_records").await, 201);
    setup.offset.advance(HOUR + Duration::from_secs(10));
    setup.until_count("idem_records", |records| records == 1).await;
    assert_eq!(
        setup.store.settle(&owner, &completed(), HOUR).await.unwrap(),
        OwnerOutcome::Applied,
        "it is left alone"
    );
    for purger in purgers {
        purger.stop().await;
    }
    setup.offset.advance(2 * HOUR);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(setup.count("idem_records").await, 1, "nobody is there to remove it");
}

#[tokio::test]
async fn partitions_whose_records_are_all_over_are_dropped_whole() {
    let setup = setup(|config| config.partitioned(HOUR)).await;
    let purger = setup.purger();
    setup.until_count("idem_partitions", |partitions| partitions >= 3).await;
    let long_lived = setup.settled(24 * HOUR).await;
    for _ in 0..12 {
        setup.settled(HOUR).await;
        let newest = format!("SELECT max(start_at) FROM {}.idem_partitions", setup.schema.name);
        let newest = number(&mut connection().await, newest).await;
        let made_next = format!("idem_partitions WHERE start_at > {newest}");
        setup.offset.advance(HOUR);
        setup.until_count(&made_next, |partitions| partitions > 0).await;
    }
    // One for the long-lived record, those of the last retention and the current hour, and two to come.
    setup.until_count("idem_partitions", |partitions| (4..=6).contains(&partitions)).await;
    assert_eq!(setup.count("idem_records_rest").await, 0);
    let replay = setup.store.acquire(&repeat_of(&long_lived)).await.unwrap();
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    setup.offset.advance(24 * HOUR);
    setup.until_count("idem_records", |records| records == 0).await;
    purger.stop().await;
}

#[tokio::test]
async fn a_transaction_that_outlives_its_partition_is_in_nobodys_way_and_commits() {
    let setup = setup(|config| config.partitioned(HOUR)).await;
    let request = kept_for(HOUR);
    let Begin::Acquired { transaction, .. } = setup.store.begin(&request).await.unwrap() else { panic!() };
    setup.settled(HOUR).await;
    let purger = setup.purger();
    setup.offset.advance(3 * HOUR);
    setup.until_count("idem_partitions WHERE name = 'idem_records_first'", |partitions| partitions == 0).await;
    assert_eq!(transaction.finish(&completed(), HOUR, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let replay = setup.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    purger.stop().await;
}

#[tokio::test]
async fn without_a_purger_records_find_a_place_all_the_same() {
    let setup = setup(|config| config.partitioned(HOUR)).await;
    setup.offset.advance(10 * HOUR);
    let request = setup.settled(HOUR).await;
    assert_eq!(setup.count("idem_records_rest").await, 1);
    // It comes too late for the period that the record is in, and in time for those after it.
    let purger = setup.purger();
    setup.until_count("idem_partitions WHERE name <> 'idem_records_rest'", |partitions| partitions >= 2).await;
    assert!(matches!(setup.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
    setup.offset.advance(2 * HOUR);
    setup.until_count("idem_records_rest", |records| records == 0).await;
    setup.settled(HOUR).await;
    assert_eq!(setup.count("idem_records_rest").await, 0);
    purger.stop().await;
}

#[tokio::test]
async fn while_partitions_cannot_be_made_in_time_records_and_partitions_are_removed_and_it_is_not_tried_in_a_loop() {
    let setup = setup(|config| config.partitioned(HOUR)).await;
    let slow = format!(
        "CREATE SEQUENCE {0}.calls MINVALUE 0;CREATE SEQUENCE {0}.rounds MINVALUE 0;SELECT nextval('{0}.calls'), nextval('{0}.rounds');
         CREATE OR REPLACE FUNCTION {0}.idem_make_partitions_v1(skew BIGINT) RETURNS VOID LANGUAGE SQL
         AS $$ SELECT nextval('{0}.calls'); SELECT pg_sleep(60) $$;
         ALTER FUNCTION {0}.idem_past_partition_v1 RENAME TO found;
         CREATE FUNCTION {0}.idem_past_partition_v1(skew BIGINT) RETURNS TEXT LANGUAGE SQL
         AS $$ SELECT nextval('{0}.rounds'); SELECT {0}.found(skew) $$",
        setup.schema.name
    );
    sql(&mut connection().await, slow).await;
    setup.settled(HOUR).await;
    setup.offset.advance(10 * HOUR);
    setup.settled(HOUR).await;
    assert_eq!(setup.count("idem_records_rest").await, 1);
    setup.offset.advance(2 * HOUR);
    let purger = setup.purger();
    setup.until_count("idem_records_rest", |records| records == 0).await;
    setup.until_count("idem_partitions WHERE name = 'idem_records_first'", |partitions| partitions == 0).await;
    setup.until_count("rounds WHERE last_value > 10", |reached| reached > 0).await;
    let calls = format!("SELECT last_value FROM {}.calls", setup.schema.name);
    assert_eq!(number(&mut connection().await, calls).await, 1);
    purger.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_acquires_across_the_boundary_of_partitions_runs() {
    // Two processes whose statements are on either side of the boundary: their clocks differ by an hour.
    let setup = setup(|config| config.partitioned(HOUR)).await;
    let purger = setup.purger();
    setup.until_count("idem_partitions", |partitions| partitions >= 3).await;
    purger.stop().await;
    let later = TimeOffset::default();
    later.advance(HOUR);
    let config = || setup.schema.config().partitioned(HOUR);
    let late = PostgresStore::open(config().time_offset(later)).await.unwrap();
    for _ in 0..50 {
        let first = Acquire { term: Term { lease: 3 * HOUR, retention: 3 * HOUR }, ..request() };
        let outcomes = futures(16, |number| {
            let (store, request) = (if number % 2 == 0 { &setup.store } else { &late }, repeat_of(&first));
            async move { store.acquire(&request).await.unwrap() }
        });
        let outcomes = outcomes.await;
        let runs = outcomes.iter().filter(|outcome| matches!(outcome, AcquireOutcome::Acquired(_))).count();
        assert_eq!(runs, 1, "{outcomes:?}");
    }
    let partitions = format!("SELECT count(DISTINCT tableoid) FROM {}.idem_records", setup.schema.name);
    assert_eq!(number(&mut connection().await, partitions).await, 2, "there were records on both sides");
}

#[tokio::test]
async fn a_key_used_again_moves_to_the_newest_partition() {
    let setup = setup(|config| config.partitioned(HOUR)).await;
    let request = setup.settled(HOUR).await;
    setup.offset.advance(2 * HOUR);
    let again = lease(&setup.store, &repeat_of(&request)).await;
    assert_eq!(again.attempt, 1);
    assert_eq!(setup.count("idem_records_first").await, 0);
    assert_eq!(setup.store.settle(&again, &completed(), HOUR).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(setup.count("idem_records").await, 1);
    sql(&mut connection().await, format!("SELECT * FROM {}.idem_records_readable", setup.schema.name)).await;
}

/// Runs `count` futures at once.
async fn futures<T, F: Future<Output = T>>(count: usize, future: impl Fn(usize) -> F) -> Vec<T> {
    futures_util::future::join_all((0..count).map(future)).await
}
