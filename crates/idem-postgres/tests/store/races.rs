//! One schedule per race: locks force the order in which two sessions meet.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, Purge, Settlement, TransactionalStore,
    Writes,
};
use idem_postgres::{PostgresStore, TimeOffset};
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, completed, mismatch_of, repeat_of, request};
use sqlx::PgConnection;

struct Race {
    schema: Schema,
    offset: TimeOffset,
    /// Two stores, as two processes would have.
    one: PostgresStore,
    other: PostgresStore,
    /// The session whose locks force the order.
    referee: PgConnection,
}

impl Race {
    async fn new() -> Self {
        let (schema, offset) = (Schema::new(), TimeOffset::default());
        let config = || schema.config().time_offset(offset.clone()).lock_timeout(Duration::from_secs(60));
        let config = || config().statement_timeout(Duration::from_secs(60));
        let one = PostgresStore::open(config()).await.unwrap();
        let other = PostgresStore::open(config()).await.unwrap();
        Self { one, other, referee: connection().await, schema, offset }
    }

    /// Waits until `count` of the stores' sessions wait for a lock.
    async fn until_waiting(&self, count: i64) {
        let mut watch = connection().await;
        let waiting = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
             AND (application_name = '{0}' OR query LIKE '%{0}%')",
            self.schema.name
        );
        let reached = async {
            while number(&mut watch, waiting.clone()).await < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), reached).await.expect("nobody waits");
    }

    async fn lease(&self, request: &Acquire) -> Lease {
        match self.one.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    /// Locks the one row that there is.
    async fn hold_row(&mut self) {
        let lock = format!("BEGIN;SELECT FROM {}.idem_records FOR UPDATE", self.schema.name);
        assert_eq!(sql(&mut self.referee, lock).await.len(), 1);
    }

    async fn let_go(&mut self) {
        sql(&mut self.referee, "COMMIT").await;
    }
}

#[tokio::test]
async fn of_two_acquires_of_one_new_key_the_second_waits_and_finds_the_first() {
    let mut race = Race::new().await;
    let (first, same, different) = (request(), request(), request());
    let same = Acquire { id: first.id, ..repeat_of(&same) };
    let different = Acquire { id: first.id, ..mismatch_of(&different) };
    // The referee inserts the row, and has not committed.
    let columns = "id, namespace, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state, \
                   acquisition, takeover, lease_until, created_at, updated_at, expires_at, purge_after";
    let lease = race.lease(&first).await;
    let copy = format!(
        "CREATE TABLE {0}.copy AS SELECT {columns} FROM {0}.idem_records;DELETE FROM {0}.idem_records",
        race.schema.name
    );
    sql(&mut race.referee, copy).await;
    let insert =
        format!("BEGIN;INSERT INTO {0}.idem_records ({columns}) SELECT {columns} FROM {0}.copy", race.schema.name);
    sql(&mut race.referee, insert).await;
    let (one, other) = (race.one.clone(), race.other.clone());
    let same = tokio::spawn(async move { one.acquire(&same).await.unwrap() });
    let different = tokio::spawn(async move { other.acquire(&different).await.unwrap() });
    race.until_waiting(2).await;
    race.let_go().await;
    assert!(matches!(same.await.unwrap(), AcquireOutcome::InProgress { .. }));
    assert!(matches!(different.await.unwrap(), AcquireOutcome::Mismatch { .. }));
    assert_eq!(race.one.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn when_the_first_of_two_acquires_fails_the_second_runs() {
    let mut race = Race::new().await;
    let first = request();
    race.lease(&first).await;
    let copy = format!(
        "CREATE TABLE {0}.copy AS SELECT * FROM {0}.idem_records;DELETE FROM {0}.idem_records",
        race.schema.name
    );
    sql(&mut race.referee, copy).await;
    let insert = format!("BEGIN;INSERT INTO {0}.idem_records SELECT * FROM {0}.copy", race.schema.name);
    sql(&mut race.referee, insert).await;
    let (one, second) = (race.one.clone(), repeat_of(&first));
    let second = tokio::spawn(async move { one.acquire(&second).await.unwrap() });
    race.until_waiting(1).await;
    sql(&mut race.referee, "ROLLBACK").await;
    assert!(matches!(second.await.unwrap(), AcquireOutcome::Acquired(Lease { attempt: 1, .. })));
}

#[tokio::test]
async fn an_acquire_that_meets_a_record_being_purged_runs_as_the_first() {
    let mut race = Race::new().await;
    let old = request();
    race.lease(&old).await;
    race.offset.advance(LEASE + RETENTION);
    // The purge has deleted the row, and has not committed.
    let delete = format!("BEGIN;DELETE FROM {}.idem_records", race.schema.name);
    sql(&mut race.referee, delete).await;
    let (one, other) = (race.one.clone(), race.other.clone());
    let (first, second) = (repeat_of(&old), repeat_of(&old));
    let first = tokio::spawn(async move { one.acquire(&first).await.unwrap() });
    let second = tokio::spawn(async move { other.acquire(&second).await.unwrap() });
    race.until_waiting(2).await;
    race.let_go().await;
    let outcomes = [first.await.unwrap(), second.await.unwrap()];
    let runs =
        outcomes.iter().filter(|outcome| matches!(outcome, AcquireOutcome::Acquired(lease) if lease.attempt == 1));
    assert_eq!(runs.count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().any(|outcome| matches!(outcome, AcquireOutcome::InProgress { .. })), "{outcomes:?}");
}

#[tokio::test]
async fn a_purge_leaves_a_record_that_is_being_acquired_again() {
    let mut race = Race::new().await;
    let old = request();
    race.lease(&old).await;
    race.offset.advance(LEASE + RETENTION);
    race.hold_row().await;
    let (one, again) = (race.one.clone(), repeat_of(&old));
    let again = tokio::spawn(async move { one.acquire(&again).await.unwrap() });
    race.until_waiting(1).await;
    assert_eq!(race.other.purge(100.try_into().unwrap()).await.unwrap(), 0, "it does not wait for the row");
    race.let_go().await;
    assert!(matches!(again.await.unwrap(), AcquireOutcome::Acquired(_)));
    assert_eq!(race.other.purge(100.try_into().unwrap()).await.unwrap(), 0);
    assert!(race.one.peek(&old.id).await.unwrap().is_some());
}

#[tokio::test]
async fn of_a_settlement_and_a_takeover_one_wins_whichever_comes_first() {
    for settlement_first in [true, false] {
        let mut race = Race::new().await;
        let crashed = request();
        let lease = race.lease(&crashed).await;
        race.offset.advance(LEASE);
        race.hold_row().await;
        let settle = || {
            let (one, lease) = (race.one.clone(), lease.clone());
            tokio::spawn(async move { one.settle(&lease, &completed(), KEPT).await.unwrap() })
        };
        let take_over = || {
            let (other, request) = (race.other.clone(), repeat_of(&crashed));
            tokio::spawn(async move { other.acquire(&request).await.unwrap() })
        };
        // Postgres grants a row to waiting sessions in the order in which they came.
        let (settled, taken_over) = if settlement_first {
            let settled = settle();
            race.until_waiting(1).await;
            (settled, take_over())
        } else {
            let taken_over = take_over();
            race.until_waiting(1).await;
            (settle(), taken_over)
        };
        race.until_waiting(2).await;
        race.let_go().await;
        let record = |outcome: &AcquireOutcome| match outcome {
            AcquireOutcome::Acquired(lease) => lease.attempt,
            AcquireOutcome::Replay(_) => 0,
            other => panic!("{other:?}"),
        };
        let (settled, attempt) = (settled.await.unwrap(), record(&taken_over.await.unwrap()));
        match settlement_first {
            true => assert_eq!((settled, attempt), (OwnerOutcome::Applied, 0)),
            false => assert_eq!((settled, attempt), (OwnerOutcome::LeaseLost, 2)),
        }
    }
}

#[tokio::test]
async fn a_leased_run_and_a_transaction_turn_each_other_away() {
    let race = Race::new().await;
    let request = request();
    let Begin::Acquired { transaction, .. } = race.one.begin(&request).await.unwrap() else { panic!("not acquired") };
    // The other process still has the contract of before the deploy.
    let leased = race.other.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(leased, AcquireOutcome::InProgress { .. }), "{leased:?}");
    assert_eq!(transaction.finish(&Settlement::Released, KEPT, Writes::Discard).await.unwrap(), OwnerOutcome::Applied);
    let AcquireOutcome::Acquired(lease) = race.other.acquire(&repeat_of(&request)).await.unwrap() else {
        panic!("the key is not free")
    };
    let begun = race.one.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(begun, Begin::Answered(AcquireOutcome::InProgress { .. })), "{begun:?}");
    race.other.settle(&lease, &completed(), KEPT).await.unwrap();
    let begun = race.one.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(begun, Begin::Answered(AcquireOutcome::Replay(_))), "{begun:?}");
}

#[tokio::test]
async fn a_leased_takeover_waits_for_nobody_while_a_transaction_takes_over() {
    let race = Race::new().await;
    let crashed = request();
    race.lease(&crashed).await;
    race.offset.advance(LEASE);
    let Begin::Acquired { lease, transaction, .. } = race.one.begin(&repeat_of(&crashed)).await.unwrap() else {
        panic!("not taken over")
    };
    assert_eq!(lease.attempt, 2);
    let leased = race.other.acquire(&repeat_of(&crashed)).await.unwrap();
    assert!(matches!(leased, AcquireOutcome::InProgress { .. }), "{leased:?}");
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert!(matches!(race.other.acquire(&repeat_of(&crashed)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn leased_runs_and_transactions_at_once_run_one_at_a_time() {
    let race = Arc::new(Race::new().await);
    for round in 0..20 {
        let first = request();
        let running = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let contenders: Vec<_> = (0..16)
            .map(|number| {
                let (race, running, request) = (Arc::clone(&race), Arc::clone(&running), repeat_of(&first));
                tokio::spawn(async move {
                    let store = if number % 4 < 2 { &race.one } else { &race.other };
                    let enter =
                        || assert_eq!(running.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0, "two at once");
                    let leave = || running.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    if number % 2 == 0 {
                        let Begin::Acquired { transaction, .. } = store.begin(&request).await.unwrap() else {
                            return 0;
                        };
                        enter();
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        leave();
                        assert_eq!(
                            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(),
                            OwnerOutcome::Applied
                        );
                    } else {
                        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { return 0 };
                        enter();
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        leave();
                        assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
                    }
                    1
                })
            })
            .collect();
        let mut runs = 0;
        for contender in contenders {
            runs += contender.await.unwrap();
        }
        assert!(runs <= 1, "round {round}: {runs} runs");
        assert_eq!(race.one.peek(&first.id).await.unwrap().is_some(), runs == 1);
    }
}

#[tokio::test]
async fn a_purge_does_not_undo_a_transaction_that_runs_an_expired_record_anew() {
    for writes in [Writes::Keep, Writes::Discard] {
        let race = Race::new().await;
        let old = request();
        race.lease(&old).await;
        race.offset.advance(LEASE + RETENTION);
        let Begin::Acquired { lease, transaction, .. } = race.one.begin(&repeat_of(&old)).await.unwrap() else {
            panic!("not acquired")
        };
        assert_eq!(lease.attempt, 1);
        assert_eq!(race.other.purge(100.try_into().unwrap()).await.unwrap(), 1, "its time is over");
        assert_eq!(transaction.finish(&completed(), KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
        assert!(matches!(race.other.acquire(&repeat_of(&old)).await.unwrap(), AcquireOutcome::Replay(_)));
    }
}

#[tokio::test]
async fn a_transaction_that_waits_for_a_purge_of_its_expired_record_commits_whether_it_is_removed_or_not() {
    for end in ["COMMIT", "ROLLBACK"] {
        let mut race = Race::new().await;
        let old = request();
        race.lease(&old).await;
        race.offset.advance(LEASE + RETENTION);
        let Begin::Acquired { transaction, .. } = race.one.begin(&repeat_of(&old)).await.unwrap() else {
            panic!("not acquired")
        };
        // The purge has deleted the row, and has not committed.
        sql(&mut race.referee, format!("BEGIN;DELETE FROM {}.idem_records", race.schema.name)).await;
        let finished = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
        race.until_waiting(1).await;
        sql(&mut race.referee, end).await;
        assert_eq!(finished.await.unwrap().unwrap(), OwnerOutcome::Applied, "{end}");
        let rows = format!("SELECT count(*) FROM {}.idem_records WHERE state = 2", race.schema.name);
        assert_eq!(number(&mut race.referee, rows).await, 1);
    }
}

#[tokio::test]
async fn a_record_that_was_not_over_and_is_gone_undoes_the_transaction() {
    let race = Race::new().await;
    let crashed = request();
    let lease = race.lease(&crashed).await;
    race.offset.advance(LEASE);
    let Begin::Acquired { transaction, .. } = race.one.begin(&repeat_of(&crashed)).await.unwrap() else {
        panic!("not taken over")
    };
    // Its owner is back, and says that it has done nothing.
    assert_eq!(race.other.settle(&lease, &Settlement::Released, KEPT).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::LeaseLost);
    assert_eq!(race.one.peek(&crashed.id).await.unwrap(), None);
}

#[tokio::test]
async fn an_expired_record_that_has_changed_undoes_the_transaction() {
    let mut race = Race::new().await;
    let old = request();
    race.lease(&old).await;
    race.offset.advance(LEASE + RETENTION);
    let Begin::Acquired { transaction, .. } = race.one.begin(&repeat_of(&old)).await.unwrap() else {
        panic!("not acquired")
    };
    // This cannot happen, unless the clock was set back: then the old owner may write.
    sql(&mut race.referee, format!("UPDATE {}.idem_records SET updated_at = updated_at + 1", race.schema.name)).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::LeaseLost);
    let rows = format!("SELECT count(*) FROM {}.idem_records WHERE state = 1", race.schema.name);
    assert_eq!(number(&mut race.referee, rows).await, 1, "it is as it was");
}

/// The number of the lock by which the transaction of `request` marks its run.
async fn lock_of(race: &mut Race, request: &Acquire) -> i64 {
    let Begin::Acquired { transaction, .. } = race.one.begin(request).await.unwrap() else { panic!("not acquired") };
    let held = format!(
        "SELECT (classid::INT8 << 32) | objid::INT8 FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND application_name = '{}'",
        race.schema.name
    );
    let held: Vec<i64> = sql(&mut race.referee, held).await.iter().map(|row| sqlx::Row::get(row, 0)).collect();
    transaction.finish(&Settlement::Released, KEPT, Writes::Discard).await.unwrap();
    for lock in &held {
        sql(&mut race.referee, format!("SELECT pg_advisory_lock({lock})")).await;
        let leased = race.other.acquire(request).await.unwrap();
        sql(&mut race.referee, format!("SELECT pg_advisory_unlock({lock})")).await;
        match leased {
            AcquireOutcome::InProgress { .. } => return *lock,
            AcquireOutcome::Acquired(lease) => {
                race.other.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("no lock keeps others from running it: {held:?}")
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_only_look_turn_nobody_away() {
    let mut race = Race::new().await;
    let request = request();
    let lock = lock_of(&mut race, &request).await;
    // Sessions that do little but take and release the lock of lookups.
    let look = format!(
        "DO $$ DECLARE locks INT8[] := array_fill({lock}::INT8, ARRAY[10000]); BEGIN
             LOOP PERFORM FROM {}.idem_lookup_v1(0, ARRAY[''::BYTEA], locks); END LOOP;
         END $$",
        race.schema.name
    );
    let mut lookers = Vec::new();
    for _ in 0..2 {
        let (mut session, look) = (connection().await, look.clone());
        let pid = number(&mut session, "SELECT pg_backend_pid()::INT8").await;
        let looking = async move { sqlx::raw_sql(sqlx::AssertSqlSafe(look)).execute(&mut session).await };
        lookers.push((pid, tokio::spawn(looking)));
    }
    let looking =
        format!("SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'DO $$%{lock}%'");
    while number(&mut race.referee, looking.clone()).await < 2 {
        tokio::task::yield_now().await;
    }
    let mut turned_away = 0;
    for _ in 0..200 {
        match race.one.begin(&repeat_of(&request)).await.unwrap() {
            Begin::Acquired { transaction, .. } => {
                transaction.finish(&Settlement::Released, KEPT, Writes::Discard).await.unwrap();
            }
            Begin::Answered(_) => turned_away += 1,
        }
    }
    for (pid, looker) in lookers {
        sql(&mut race.referee, format!("SELECT pg_terminate_backend({pid}::INT4)")).await;
        assert!(looker.await.unwrap().is_err(), "it looked until it was ended");
    }
    assert_eq!(turned_away, 0, "nobody ran it");
}
