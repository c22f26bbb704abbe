//! A step whose writes commit together with its result.

use std::pin::Pin;
use std::sync::Arc;

use idem_core::engine::{
    Context, ErrorMeaning, Idempotency, Operation, Ran, RunError, Settings, StepError, StepRecord, StepToUndo,
};
use idem_core::{AcquireOutcome, Checkpoint, Fingerprint, IdempotencyStore as _, OwnerOutcome, Scope, StoreErrorKind};
use idem_testkit::fixture::LEASE;
use sqlx::{Connection as _, SqliteConnection};
use tokio::sync::Notify;

use crate::support::Database;

/// How the first transaction of the step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Committed,
    /// COMMIT takes effect, and its answer is lost.
    AnswerLost,
    /// COMMIT takes effect, its answer is lost, and the step repeats its transaction.
    Repeated,
    /// The process is killed after COMMIT.
    KilledAfter,
    /// The process is killed before COMMIT.
    KilledBefore,
    Refused,
    /// It commits without the checkpoint.
    Forgotten,
    /// Another process takes over before the checkpoint is written.
    TakenOver,
}

type Booked = Result<Ran<u32>, RunError<StepError>>;

#[derive(Clone)]
struct World {
    database: Arc<Database>,
    killed: Arc<Notify>,
}

impl World {
    async fn new() -> Self {
        let database = Database::new().await;
        sqlx::raw_sql("CREATE TABLE seats (key TEXT)").execute(database.store.pool()).await.unwrap();
        Self { database: Arc::new(database), killed: Arc::default() }
    }

    /// A connection of the application.
    async fn connection(&self) -> SqliteConnection {
        let url = format!("sqlite://{}", self.database.folder.path().join("records.db").display());
        SqliteConnection::connect(&url).await.unwrap()
    }

    fn engine(&self) -> Idempotency {
        Idempotency::at_least_once(Arc::new(self.database.store.clone()), Settings::new().lease(LEASE))
    }

    async fn seats(&self) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM seats");
        count.fetch_one(&mut self.connection().await).await.unwrap()
    }

    /// Boxed, as it may run inside itself.
    fn run(&self, end: End) -> Pin<Box<dyn Future<Output = Booked> + Send>> {
        let (world, engine) = (self.clone(), self.engine());
        let run = move |context| async move { world.book(context, end).await };
        let fingerprint = Fingerprint::of_bytes("book", b"seat");
        let operation = Operation::new(Scope::new("acme", "book"), "order-4711".parse().unwrap(), fingerprint);
        Box::pin(async move { engine.run_classified(operation, StepError::meaning, run).await })
    }

    async fn book(&self, context: Context, end: End) -> Result<u32, StepError> {
        let world = self.clone();
        let undo = move |step: StepToUndo<u32>| async move {
            let delete = sqlx::query("DELETE FROM seats WHERE key = ?").bind(step.step_key);
            delete.execute(&mut world.connection().await).await.unwrap();
            Ok::<_, String>(())
        };
        let mut steps = context.steps()?;
        let seat = steps.step("seat").undo(undo);
        let meaning = |error: &String| if error == "refused" { ErrorMeaning::Final } else { ErrorMeaning::Fault };
        let seat = seat
            .run_with_record(meaning, |record| async move {
                if end == End::Repeated {
                    self.reserve(&record, End::Committed).await?;
                }
                self.reserve(&record, end).await
            })
            .await?;
        Ok(seat)
    }

    async fn reserve(&self, record: &StepRecord<u32>, end: End) -> Result<u32, String> {
        let mut connection = self.connection().await;
        if end == End::TakenOver {
            self.database.clock.advance(LEASE);
            let taken_over = self.run(End::Committed).await;
            assert_eq!(taken_over.unwrap().value, 7);
        }
        let sql = async |connection: &mut SqliteConnection, statement: &'static str| {
            sqlx::raw_sql(statement).execute(connection).await.unwrap();
        };
        sql(&mut connection, "BEGIN").await;
        sqlx::query("INSERT INTO seats VALUES (?)").bind(record.key()).execute(&mut connection).await.unwrap();
        if end != End::Forgotten {
            let checkpoint = record.checkpoint(&7).map_err(|error| error.to_string())?;
            let written =
                self.database.store.checkpoint_within(&mut connection, record.lease(), &checkpoint).await.unwrap();
            if written == OwnerOutcome::LeaseLost {
                sql(&mut connection, "ROLLBACK").await;
                return Err("the lease is lost".to_owned());
            }
        }
        match end {
            End::KilledBefore => {
                self.killed.notify_one();
                std::future::pending::<()>().await;
            }
            End::Refused => return Err("refused".to_owned()),
            _ => sql(&mut connection, "COMMIT").await,
        }
        match end {
            End::AnswerLost => Err("no answer to COMMIT".to_owned()),
            End::KilledAfter => {
                self.killed.notify_one();
                std::future::pending().await
            }
            _ => Ok(7),
        }
    }

    /// Kills the process in which the operation runs.
    async fn killed(&self, end: End) {
        let world = self.clone();
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let killed = Arc::clone(&world.killed);
                tokio::select! {
                    ended = world.run(end) => panic!("{ended:?}"),
                    () = killed.notified() => {}
                }
            });
        });
        tokio::task::spawn_blocking(|| process.join()).await.unwrap().unwrap();
        self.database.clock.advance(LEASE);
    }
}

#[tokio::test]
async fn writes_and_result_of_a_step_commit_together() {
    for (end, seats) in [(End::Committed, 1), (End::AnswerLost, 1), (End::Repeated, 1)] {
        let world = World::new().await;
        let first = world.run(end).await;
        assert!(matches!(&first, Ok(ran) if ran.value == 7 && !ran.replayed), "{end:?}: {first:?}");
        let again = world.run(End::Committed).await;
        assert!(matches!(&again, Ok(ran) if ran.replayed), "{end:?}: {again:?}");
        assert_eq!(world.seats().await, seats, "{end:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_around_the_commit_of_a_step_leaves_both_or_nothing() {
    for (end, left) in [(End::KilledBefore, 0), (End::KilledAfter, 1)] {
        let world = World::new().await;
        world.killed(end).await;
        assert_eq!(world.seats().await, left, "{end:?}");
        let ran = world.run(End::Committed).await;
        assert!(matches!(&ran, Ok(ran) if ran.value == 7 && !ran.replayed), "{end:?}: {ran:?}");
        assert_eq!(world.seats().await, 1, "{end:?}");
    }
}

#[tokio::test]
async fn a_step_that_does_not_commit_its_checkpoint_is_undone() {
    let world = World::new().await;
    let ended = world.run(End::Forgotten).await;
    let Err(RunError::Failed(StepError::Failed { message, .. })) = ended else { panic!("{ended:?}") };
    assert_eq!(message, "it did not commit its checkpoint with its writes");
    assert_eq!(world.seats().await, 0);
    let world = World::new().await;
    let ended = world.run(End::Refused).await;
    assert!(
        matches!(&ended, Err(RunError::Failed(StepError::Failed { message, .. })) if message == "refused"),
        "{ended:?}"
    );
    assert_eq!(world.seats().await, 0);
}

#[tokio::test]
async fn a_run_whose_lease_was_taken_over_commits_no_step() {
    let world = World::new().await;
    let ended = world.run(End::TakenOver).await;
    assert!(matches!(&ended, Ok(ran) if ran.value == 7 && ran.replayed), "{ended:?}");
    assert_eq!(world.seats().await, 1);
}

/// A driver may end a transaction unnoticed, and commit what comes next by itself.
#[tokio::test]
async fn no_checkpoint_is_written_without_a_transaction() {
    let world = World::new().await;
    let (store, request) = (&world.database.store, idem_testkit::fixture::request());
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!("it is free") };
    let checkpoint = Checkpoint { sequence: 1, name: "booked".into(), data: "7".into() };
    let mut connection = world.connection().await;
    let failed = store.checkpoint_within(&mut connection, &lease, &checkpoint).await.unwrap_err();
    assert_eq!(failed.kind(), StoreErrorKind::TransactionFailed, "{failed:?}");
    assert_eq!(store.peek(&lease.id).await.unwrap().unwrap().checkpoint, None);
    // The connection can go on.
    let mut transaction = connection.begin().await.unwrap();
    let written = store.checkpoint_within(&mut transaction, &lease, &checkpoint).await.unwrap();
    assert_eq!(written, OwnerOutcome::Applied);
    transaction.commit().await.unwrap();
    assert_eq!(store.peek(&lease.id).await.unwrap().unwrap().checkpoint, Some(checkpoint));
}
