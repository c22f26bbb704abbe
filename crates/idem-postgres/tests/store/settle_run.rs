//! Handlers that settle their runs by SQL, in transactions that the store does not know.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::codec::encode_headers;
use idem_core::engine::{
    Answer, Conclusion, Context, Disposition, Event, EventKind, Idempotency, Observer, Operation, Settings,
};
use idem_core::{
    AcquireOutcome, Fingerprint, HeaderField, IdempotencyStore, Lease, OwnerOutcome, ReplayKind, Scope, Settlement,
    State, StoredBody, StoredResponse, Writes,
};
use idem_postgres::{PostgresStore, TimeOffset};
use idem_testkit::fixture::{KEPT, LEASE, completed, repeat_of, request};
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use crate::support::{Configure as _, Schema, connection, number, sql};

/// What a handler passes to the statement.
#[derive(Clone)]
struct Arguments {
    record: Vec<u8>,
    owner: Vec<u8>,
    kind: Option<&'static str>,
    status: Option<i32>,
    names: Option<Vec<Option<&'static str>>>,
    values: Option<Vec<Option<&'static str>>>,
    body: Option<Vec<u8>>,
    retention: Option<i64>,
}

impl Arguments {
    fn of(lease: &Lease) -> Self {
        Self {
            record: lease.id.as_bytes().to_vec(),
            owner: lease.owner.as_bytes().to_vec(),
            kind: Some("completed"),
            status: Some(201),
            names: Some(vec![Some("content-type"), Some("x-name")]),
            values: Some(vec![Some("application/json"), Some("Zoë")]),
            body: Some(b"{}".to_vec()),
            retention: Some(3600),
        }
    }
}

/// The answer that [`Arguments::of`] settles.
fn settled() -> StoredResponse {
    let field = |name: &'static str, value: &'static str| HeaderField {
        name: name.as_bytes().into(),
        value: value.as_bytes().into(),
    };
    let headers = [field("content-type", "application/json"), field("x-name", "Zoë")];
    StoredResponse { headers: headers.into(), ..StoredResponse::new(201, "{}") }
}

struct World {
    schema: Schema,
    offset: TimeOffset,
    store: Arc<PostgresStore>,
}

async fn world() -> World {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = schema.config().time_offset(offset.clone()).lock_timeout(Duration::from_millis(200));
    let store = Arc::new(PostgresStore::open(config).await.unwrap());
    sql(&mut connection().await, format!("CREATE TABLE {}.effects (amount BIGINT)", schema.name)).await;
    World { schema, offset, store }
}

impl World {
    async fn lease(&self, request: &idem_core::Acquire) -> Lease {
        match self.store.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    async fn settle_run(&self, connection: &mut PgConnection, arguments: &Arguments) -> Result<(), sqlx::Error> {
        let Arguments { record, owner, kind, status, names, values, body, retention } = arguments.clone();
        let call =
            sqlx::query(AssertSqlSafe(self.store.settle_run_sql())).bind(record).bind(owner).bind(kind).bind(status);
        call.bind(names).bind(values).bind(body).bind(retention).execute(connection).await.map(drop)
    }

    /// Begins, and makes the business write.
    async fn begin(&self) -> PgConnection {
        let mut business = connection().await;
        sql(&mut business, format!("BEGIN; INSERT INTO {}.effects VALUES (1250)", self.schema.name)).await;
        business
    }

    /// A whole transaction of a handler.
    async fn pay(&self, arguments: &Arguments) -> Result<(), sqlx::Error> {
        let mut business = self.begin().await;
        self.settle_run(&mut business, arguments).await?;
        sql(&mut business, "COMMIT").await;
        Ok(())
    }

    async fn effects(&self) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.effects", self.schema.name)).await
    }
}

fn refusal(result: Result<(), sqlx::Error>) -> (String, String) {
    let error = result.unwrap_err().into_database_error().unwrap();
    (error.code().unwrap().into_owned(), error.message().to_owned())
}

#[tokio::test]
async fn writes_and_record_commit_together() {
    let world = world().await;
    let request = request();
    let lease = world.lease(&request).await;
    let mut business = world.begin().await;
    world.settle_run(&mut business, &Arguments::of(&lease)).await.unwrap();
    // A repetition, as after a lost answer in the same transaction.
    world.settle_run(&mut business, &Arguments::of(&lease)).await.unwrap();
    assert!(matches!(world.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::InProgress { .. }));
    sql(&mut business, "COMMIT").await;
    let AcquireOutcome::Replay(replay) = world.store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
    assert_eq!((replay.response, replay.kind, replay.attempt), (settled(), ReplayKind::Completed, 1));
    assert_eq!(world.effects().await, 1);
    let stored = format!("SELECT headers, expires_at - updated_at FROM {}.idem_records", world.schema.name);
    let row = &sql(&mut connection().await, stored).await[0];
    assert_eq!(row.get::<Vec<u8>, _>(0), encode_headers(&settled().headers, None), "as the library encodes it");
    assert_eq!(row.get::<i64, _>(1), 3_600_000_000);
}

#[tokio::test]
async fn without_headers_and_body_the_record_has_none() {
    let world = world().await;
    for (kind, expected) in [("completed", ReplayKind::Completed), ("failed", ReplayKind::Failed)] {
        for empty in [None, Some(Vec::new())] {
            let request = request();
            let lease = world.lease(&request).await;
            let arguments = Arguments {
                kind: Some(kind),
                names: empty.clone(),
                values: empty,
                body: None,
                ..Arguments::of(&lease)
            };
            world.pay(&arguments).await.unwrap();
            let AcquireOutcome::Replay(replay) = world.store.acquire(&repeat_of(&request)).await.unwrap() else {
                panic!()
            };
            let stored = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(201, "") };
            assert_eq!((replay.response, replay.kind), (stored, expected));
        }
    }
}

/// The answer to the first COMMIT was lost, or came late. A handler that repeats its transaction must not pay twice.
#[tokio::test]
async fn a_transaction_that_is_repeated_after_the_first_has_committed_cannot_commit() {
    for waits in [false, true] {
        let world = world().await;
        let request = request();
        let lease = world.lease(&request).await;
        let mut first = world.begin().await;
        let mut second = world.begin().await;
        world.settle_run(&mut first, &Arguments::of(&lease)).await.unwrap();
        let arguments = Arguments::of(&lease);
        let repeated = world.settle_run(&mut second, &arguments);
        let refused = if waits {
            // The second waits for the lock of the first.
            let commit = async {
                let waiters = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND query LIKE '%idem_settle_run_v1%' AND query NOT LIKE '%pg_stat_activity%' AND query LIKE '%' || $$NAME$$ || '%'";
                let waiters = waiters.replace("NAME", &world.schema.name);
                let mut looking = connection().await;
                while number(&mut looking, waiters.clone()).await == 0 {
                    tokio::task::yield_now().await;
                }
                sql(&mut first, "COMMIT").await;
            };
            tokio::join!(repeated, commit).0
        } else {
            sql(&mut first, "COMMIT").await;
            repeated.await
        };
        assert_eq!(refusal(refused).0, "IDM03", "waits: {waits}");
        sql(&mut second, "COMMIT").await;
        assert_eq!(world.effects().await, 1, "waits: {waits}");
        let outcome = world.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_settlement_in_a_savepoint_that_is_rolled_back_can_be_made_again() {
    let world = world().await;
    let (one, other) = (world.lease(&request()).await, world.lease(&request()).await);
    let mut business = world.begin().await;
    world.settle_run(&mut business, &Arguments::of(&other)).await.unwrap();
    sql(&mut business, "SAVEPOINT here").await;
    world.settle_run(&mut business, &Arguments::of(&one)).await.unwrap();
    sql(&mut business, "ROLLBACK TO here").await;
    for lease in [&one, &one, &other] {
        world.settle_run(&mut business, &Arguments::of(lease)).await.unwrap();
    }
    sql(&mut business, "COMMIT").await;
    for lease in [&one, &other] {
        assert!(!matches!(world.store.peek(&lease.id).await.unwrap().unwrap().state, State::InProgress { .. }));
    }
}

/// The end that purges and partitions know moves with the record, even if the answer is kept for longer than the record was.
#[tokio::test]
async fn an_answer_that_is_kept_for_longer_is_not_purged_before() {
    let world = world().await;
    let lease = world.lease(&request()).await;
    let arguments = Arguments { retention: Some(90 * 24 * 3600), ..Arguments::of(&lease) };
    world.pay(&arguments).await.unwrap();
    let early = format!("SELECT count(*) FROM {}.idem_records WHERE purge_after < expires_at", world.schema.name);
    assert_eq!(number(&mut connection().await, early).await, 0);
}

#[tokio::test]
async fn header_names_are_stored_in_lower_case() {
    let world = world().await;
    let lease = world.lease(&request()).await;
    let arguments = Arguments { names: Some(vec![Some("Content-Type"), Some("X-Name")]), ..Arguments::of(&lease) };
    world.pay(&arguments).await.unwrap();
    let settle = world.store.settle(&lease, &Settlement::Completed(settled()), KEPT).await.unwrap();
    assert_eq!(settle, OwnerOutcome::Applied, "it is the same answer");
}

#[tokio::test]
async fn a_transaction_that_rolls_back_has_not_settled() {
    let world = world().await;
    let request = request();
    let lease = world.lease(&request).await;
    let mut business = world.begin().await;
    world.settle_run(&mut business, &Arguments::of(&lease)).await.unwrap();
    sql(&mut business, "ROLLBACK").await;
    assert!(matches!(world.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::InProgress { .. }));
    world.offset.advance(LEASE);
    assert_eq!(world.lease(&repeat_of(&request)).await.attempt, 2);
    assert_eq!(world.effects().await, 0);
}

#[tokio::test]
async fn a_run_that_does_not_own_its_record_cannot_commit() {
    let world = world().await;
    let request = request();
    let crashed = world.lease(&request).await;
    world.offset.advance(LEASE);
    let successor = world.lease(&repeat_of(&request)).await;
    let lost = "the run does not own its record any more, so its transaction must not commit";
    let mut business = world.begin().await;
    let refused = refusal(world.settle_run(&mut business, &Arguments::of(&crashed)).await);
    assert_eq!(refused, ("IDM03".to_owned(), lost.to_owned()));
    // Postgres answers ROLLBACK to the COMMIT of a failed transaction.
    sql(&mut business, "COMMIT").await;
    assert_eq!(world.effects().await, 0);
    assert_eq!(world.store.settle(&successor, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    for late in [&crashed, &successor] {
        let refused = refusal(world.pay(&Arguments::of(late)).await);
        assert_eq!(refused.0, "IDM03", "it is settled, with another answer");
    }
}

#[tokio::test]
async fn no_other_run_begins_between_the_settlement_and_the_commit() {
    let world = world().await;
    let request = request();
    let lease = world.lease(&request).await;
    let mut business = world.begin().await;
    world.settle_run(&mut business, &Arguments::of(&lease)).await.unwrap();
    world.offset.advance(LEASE);
    let error = world.store.acquire(&repeat_of(&request)).await.unwrap_err();
    assert_eq!(error.kind(), idem_core::StoreErrorKind::Timeout, "it waits as long as it may: {error:?}");
    assert!(error.has_existing_record(), "no engine may fail open: {error:?}");
    sql(&mut business, "COMMIT").await;
    let outcome = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
}

#[tokio::test]
async fn wrong_arguments_are_refused_with_advice_and_change_nothing() {
    let world = world().await;
    let request = request();
    let lease = world.lease(&request).await;
    let good = Arguments::of(&lease);
    let cases = [
        (Arguments { kind: Some("done"), ..good.clone() }, "kind must be 'completed' or 'failed', not 'done'"),
        (Arguments { kind: None, ..good.clone() }, "kind must be 'completed' or 'failed', not NULL"),
        (
            Arguments { record: vec![1; 31], ..good.clone() },
            "record must have 32 bytes and owner 16: pass the id and the owner of the run's lease",
        ),
        (
            Arguments { owner: vec![1; 17], ..good.clone() },
            "record must have 32 bytes and owner 16: pass the id and the owner of the run's lease",
        ),
        (
            Arguments { owner: vec![0; 16], ..good.clone() },
            "owner must be that of a lease: no run has the owner of 16 zero bytes",
        ),
        (
            Arguments { names: Some(vec![Some("x y"), Some("a")]), ..good.clone() },
            "header_names must be names of header fields, and header_values must have no control characters",
        ),
        (
            Arguments { values: Some(vec![Some("a\r\nSet-Cookie: b"), Some("c")]), ..good.clone() },
            "header_names must be names of header fields, and header_values must have no control characters",
        ),
        (
            Arguments { names: Some(vec![Some("Content-Length"), Some("a")]), ..good.clone() },
            "header_names must not describe the first connection, such as content-length: each replay has its own",
        ),
        (Arguments { status: Some(65536), ..good.clone() }, "status must be a number from 0 to 65535, not 65536"),
        (Arguments { status: None, ..good.clone() }, "status must be a number from 0 to 65535, not NULL"),
        (
            Arguments { names: Some(vec![Some("a")]), ..good.clone() },
            "header_names and header_values must have the same length, and no NULL",
        ),
        (
            Arguments { values: Some(vec![Some("a"), None]), ..good.clone() },
            "header_names and header_values must have the same length, and no NULL",
        ),
        (
            Arguments { values: None, ..good.clone() },
            "header_names and header_values must have the same length, and no NULL",
        ),
        (
            Arguments { retention: Some(0), ..good.clone() },
            "retention_seconds must be a number from 1 to 9223372036854, not 0",
        ),
        (
            Arguments { retention: Some(i64::MAX), ..good.clone() },
            "retention_seconds must be a number from 1 to 9223372036854, not 9223372036854775807",
        ),
        (
            Arguments { retention: None, ..good.clone() },
            "retention_seconds must be a number from 1 to 9223372036854, not NULL",
        ),
    ];
    for (arguments, message) in cases {
        let refused = refusal(world.pay(&arguments).await);
        assert_eq!(refused, ("22023".to_owned(), message.to_owned()));
    }
    let unchanged = world.store.peek(&lease.id).await.unwrap().unwrap();
    assert_eq!(unchanged.owner, lease.owner);
    let longest = Arguments { retention: Some(9_223_372_036_854), ..good };
    world.pay(&longest).await.unwrap();
}

/// The names of the events, and whether the run's answer came from the record.
#[derive(Debug, Default, Clone)]
struct Seen(Arc<Mutex<Vec<&'static str>>>);

impl Observer for Seen {
    fn observe(&self, event: &Event<'_>) {
        self.0.lock().unwrap().push(event.kind.name());
    }
}

struct Engine {
    world: World,
    engine: Idempotency,
    seen: Seen,
    operation: Operation,
}

async fn engine() -> Engine {
    let (world, seen) = (world().await, Seen::default());
    let settings = Settings::new().observer(Arc::new(seen.clone()));
    let engine = Idempotency::at_least_once(Arc::<PostgresStore>::clone(&world.store), settings);
    let fingerprint = Fingerprint::of_bytes("pay", b"1250");
    let operation = Operation::new(Scope::new("acme", "pay"), "order-4711".parse().unwrap(), fingerprint);
    Engine { world, engine, seen, operation }
}

/// How a handler ends that has settled its run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    SameAnswer,
    OtherOrder,
    OtherAnswer,
    Fault,
    Panic,
    Release,
}

/// Whether the handler returns what it has settled.
fn is_same(end: End) -> bool {
    matches!(end, End::SameAnswer | End::OtherOrder)
}

impl Engine {
    /// Runs a handler that writes, settles its run and commits.
    async fn execute(&self, end: End) -> Answer<&'static str> {
        let (store, schema) = (Arc::clone(&self.world.store), self.world.schema.name.clone());
        let run = move |context: Context| async move {
            let mut business = connection().await;
            sql(&mut business, format!("BEGIN; INSERT INTO {schema}.effects VALUES (1250)")).await;
            let Arguments { record, owner, kind, status, names, values, body, retention } =
                Arguments::of(context.lease().unwrap());
            let call =
                sqlx::query(AssertSqlSafe(store.settle_run_sql())).bind(record).bind(owner).bind(kind).bind(status);
            call.bind(names).bind(values).bind(body).bind(retention).execute(&mut business).await.unwrap();
            sql(&mut business, "COMMIT").await;
            let response = |body: &'static str| StoredResponse::new(500, body);
            let disposition = match end {
                End::SameAnswer => Disposition::Complete { response: settled(), writes: Writes::Keep },
                End::OtherOrder => {
                    let mut headers = settled().headers.to_vec();
                    headers.reverse();
                    let response = StoredResponse { headers: headers.into(), ..settled() };
                    Disposition::Complete { response, writes: Writes::Keep }
                }
                End::OtherAnswer => Disposition::Complete { response: response("other"), writes: Writes::Keep },
                End::Fault => Disposition::Fault { response: response("the answer to COMMIT was lost") },
                End::Panic => panic!("after COMMIT"),
                End::Release => Disposition::Release { writes: Writes::Keep },
            };
            Conclusion { value: "ran", disposition, retention: None }
        };
        let on_panic = || Conclusion {
            value: "panicked",
            disposition: Disposition::Fault { response: StoredResponse::new(500, "") },
            retention: None,
        };
        self.engine.execute(self.operation.clone(), run, on_panic).await.unwrap()
    }
}

#[tokio::test]
async fn the_engine_recognises_a_run_that_its_handler_has_settled() {
    for end in [End::SameAnswer, End::OtherOrder, End::OtherAnswer, End::Fault, End::Panic, End::Release] {
        let engine = engine().await;
        let first = engine.execute(end).await;
        match first {
            Answer::Ran { value, attempt: 1, protected: true } if is_same(end) => assert_eq!(value, "ran"),
            Answer::Replay(replay) if !is_same(end) => {
                assert_eq!((replay.response, replay.kind), (settled(), ReplayKind::Completed), "{end:?}");
            }
            other => panic!("{end:?}: {other:?}"),
        }
        let Answer::Replay(replay) = engine.execute(end).await else { panic!("{end:?}") };
        assert_eq!(replay.response, settled(), "{end:?}");
        assert_eq!(engine.world.effects().await, 1, "{end:?}");
        let seen = engine.seen.0.lock().unwrap().clone();
        let lost = EventKind::LeaseLost.name();
        assert!(!seen.is_empty() && !seen.contains(&lost), "{end:?}: {seen:?}");
        assert_eq!(
            engine.world.store.peek(&engine.engine.acquire_for(&engine.operation).id).await.unwrap().unwrap().attempt,
            1
        );
    }
}

#[tokio::test]
async fn a_run_that_another_owner_has_superseded_still_counts_as_lost() {
    let engine = engine().await;
    let (store, operation) = (Arc::clone(&engine.world.store), engine.operation.clone());
    let schema = engine.world.schema.name.clone();
    let run = move |context: Context| async move {
        // Another owner, as after a lease that has run out.
        let lease = context.lease().unwrap().clone();
        sql(
            &mut connection().await,
            format!("UPDATE {schema}.idem_records SET owner = decode('{}', 'hex')", "ab".repeat(16)),
        )
        .await;
        let other = Lease { owner: idem_core::OwnerToken::from_bytes([0xab; 16]), ..lease };
        store.settle(&other, &Settlement::Completed(StoredResponse::new(202, "the other's")), KEPT).await.unwrap();
        Conclusion {
            value: "ran",
            disposition: Disposition::Complete { response: settled(), writes: Writes::Keep },
            retention: None,
        }
    };
    let on_panic = || panic!("it does not panic");
    let Answer::Replay(replay) = engine.engine.execute(operation, run, on_panic).await.unwrap() else { panic!() };
    assert_eq!(replay.response.status, 202);
    assert!(engine.seen.0.lock().unwrap().contains(&EventKind::LeaseLost.name()));
}

/// A driver may end a transaction unnoticed. What comes next would be committed by itself: an answer without its effect.
#[tokio::test]
async fn a_run_is_not_settled_without_a_transaction() {
    let world = world().await;
    let request = request();
    let lease = world.lease(&request).await;
    let mut business = world.begin().await;
    sql(&mut business, "ROLLBACK").await;
    let (state, message) = refusal(world.settle_run(&mut business, &Arguments::of(&lease)).await);
    assert_eq!(state, "25P01", "{message}");
    let record = world.store.peek(&lease.id).await.unwrap().unwrap();
    assert!(matches!(record.state, State::InProgress { .. }), "{record:?}");
    // The transaction of a driver that has begun another one since has no writes either.
    sql(&mut business, "BEGIN").await;
    assert_eq!(refusal(world.settle_run(&mut business, &Arguments::of(&lease)).await).0, "25P01");
    sql(&mut business, "ROLLBACK").await;
    let mut business = world.begin().await;
    world.settle_run(&mut business, &Arguments::of(&lease)).await.unwrap();
    let limit = sql(&mut business, "SHOW idle_in_transaction_session_timeout").await;
    assert_eq!(limit[0].get::<String, _>(0), "10s", "a process that freezes here would keep the key");
    sql(&mut business, "COMMIT").await;
    assert!(matches!(world.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
}
