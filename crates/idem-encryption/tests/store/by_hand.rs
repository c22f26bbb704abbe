//! Transactions of the application on Postgres, which pass the wrapper by.

use idem_core::{IdempotencyStore as _, OwnerOutcome, ReplayKind, StoredBody, StoredResponse, TimeOffset};
use idem_encryption::{EncryptedStore, EncryptionConfig};
use idem_postgres::{Join, PostgresStore};
use idem_schemas::Schema;
use idem_testkit::fixture::{KEPT, LEASE, checkpoint, completed, repeat_of, request, response};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::support::{keys, lease, postgres, replayed, settle};

struct World {
    store: EncryptedStore<PostgresStore>,
    connection: PgConnection,
    offset: TimeOffset,
    schema: Schema,
}

async fn world() -> World {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = EncryptionConfig::new(keys(1, 2)).hashing_scopes([9; 32]);
    let store = EncryptedStore::new(postgres(&schema, &offset).await, config);
    let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
    let table = format!("CREATE TABLE {}.effects (id INTEGER)", schema.name);
    sqlx::raw_sql(AssertSqlSafe(table)).execute(&mut connection).await.unwrap();
    World { store, connection, offset, schema }
}

#[tokio::test]
async fn a_joined_transaction_takes_a_sealed_settlement() {
    let mut world = world().await;
    let store = world.store.clone();
    let request = request();
    let mut transaction = world.connection.begin().await.unwrap();
    let joined = store.inner().join(&mut transaction, &store.seal_request(&request)).await.unwrap();
    let Join::Acquired(run) = joined else { panic!("{joined:?}") };
    let sealed = store.seal_settlement(run.lease(), &completed()).unwrap();
    run.settle(&mut transaction, &sealed, KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(replayed(store.acquire(&repeat_of(&request)).await), response());
    // The next transaction is answered by the sealed record.
    let repeat = repeat_of(&request);
    let mut transaction = world.connection.begin().await.unwrap();
    let joined = store.inner().join(&mut transaction, &store.seal_request(&repeat)).await.unwrap();
    let Join::Answered(outcome) = joined else { panic!("{joined:?}") };
    assert_eq!(replayed(store.open_outcome(&repeat, outcome).await), response());
}

/// The statement for drivers other than sqlx takes header values as text.
#[tokio::test]
async fn the_statement_takes_a_sealed_answer() {
    let World { store, mut connection, schema, .. } = world().await;
    let request = request();
    let lease = lease(&store, &request).await;
    let StoredResponse { status, headers, body, .. } =
        store.seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    let StoredBody::Retained(body) = body else { panic!("it has a body") };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut transaction = connection.begin().await.unwrap();
    let insert = format!("INSERT INTO {}.effects VALUES (1)", schema.name);
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut *transaction).await.unwrap();
    sqlx::query(AssertSqlSafe(store.inner().settle_run_sql()))
        .bind(&lease.id.as_bytes()[..])
        .bind(&lease.owner.as_bytes()[..])
        .bind("completed")
        .bind(i32::from(status))
        .bind(headers.iter().map(|field| text(&field.name)).collect::<Vec<_>>())
        .bind(headers.iter().map(|field| text(&field.value)).collect::<Vec<_>>())
        .bind(&body[..])
        .bind(3_600_i64)
        .execute(&mut *transaction)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    // The engine settles the run again, perhaps after a rotation.
    settle(&store, &lease, &completed()).await;
    store.rotate(keys(2, 2));
    settle(&store, &lease, &completed()).await;
    assert_eq!(replayed(store.acquire(&repeat_of(&request)).await), response());
}

#[tokio::test]
async fn a_guard_takes_a_sealed_checkpoint() {
    let mut world = world().await;
    let store = world.store.clone();
    let request = request();
    let crashed = lease(&store, &request).await;
    let sealed = store.seal_checkpoint(&crashed, &checkpoint("charged")).unwrap();
    let mut transaction = world.connection.begin().await.unwrap();
    let written = store.inner().guard(&crashed).checkpoint(&mut transaction, &sealed).await.unwrap();
    assert_eq!(written, OwnerOutcome::Applied);
    transaction.commit().await.unwrap();
    world.offset.advance(LEASE);
    assert_eq!(lease(&store, &repeat_of(&request)).await.checkpoint, Some(checkpoint("charged")));
    // A joined transaction that takes over gets it sealed.
    world.offset.advance(LEASE);
    let mut transaction = world.connection.begin().await.unwrap();
    let joined = store.inner().join(&mut transaction, &store.seal_request(&repeat_of(&request))).await.unwrap();
    let Join::Acquired(run) = joined else { panic!("{joined:?}") };
    assert_ne!(run.lease().checkpoint, Some(checkpoint("charged")));
    assert_eq!(store.open_lease(run.lease().clone()).unwrap().checkpoint, Some(checkpoint("charged")));
}
