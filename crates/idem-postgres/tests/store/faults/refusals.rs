//! A server or a pooler that refuses for a while. The store passes its message on and reports an outage. It works again once
//! the cause is gone. Only what is certain when a store is opened is reported as a wrong setting.

use idem_core::{IdempotencyStore, Purge, StoreError, StoreErrorKind};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_servers::{PgBouncer, Postgres};
use idem_testkit::fixture::request;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection};

use crate::support::{Configure as _, Schema, connection, sql};
use crate::world::{World, at_port, connect, eventually, transactional};
use idem_proxy::postgres::Losses;
use idem_proxy::{Ended, Proxy};

fn port_of(url: &str) -> u16 {
    let options: PgConnectOptions = url.parse().unwrap();
    options.get_port()
}

fn is_outage(verb: &str, error: &StoreError, words: &str) {
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{verb}: {error:?}");
    assert!(error.to_string().contains(words), "{verb} does not say {words:?}: {error}");
}

/// Whether the error says to call `through_transaction_pooler()`.
fn tells_what_to_call(error: &StoreError) -> bool {
    error.to_string().contains("through_transaction_pooler()")
}

/// Every call is refused in these words.
async fn all_refuse(store: &PostgresStore, words: &str) {
    is_outage("acquire", &store.acquire(&request()).await.unwrap_err(), words);
    is_outage("peek", &store.peek(&request().id).await.unwrap_err(), words);
    is_outage("purge", &store.purge(10.try_into().unwrap()).await.unwrap_err(), words);
    let begun = idem_core::TransactionalStore::begin(store, &transactional()).await;
    is_outage("begin", &begun.unwrap_err(), words);
}

/// Takes all client connections of a pooler, as soon as other clients have closed theirs.
async fn fill(url: &str, places: usize) -> Vec<PgConnection> {
    let options: PgConnectOptions = url.parse().unwrap();
    let options = options.extra_float_digits(None);
    let mut clients = Vec::new();
    while clients.len() < places {
        clients.push(eventually("a place is free", async || options.connect().await.ok()).await);
    }
    assert!(options.connect().await.is_err(), "there are more places");
    clients
}

async fn empty(clients: Vec<PgConnection>) {
    for client in clients {
        client.close().await.unwrap();
    }
}

const FULL: &str = "no more connections allowed";

#[tokio::test]
async fn a_pooler_that_is_full_is_an_outage_and_says_so() {
    let server = idem_servers::postgres_url();
    let pooler = PgBouncer::start_with(&server, 4, &["max_client_conn = 6"]).unwrap();
    let proxy = Proxy::<Losses>::to_port(port_of(pooler.url())).await.unwrap();
    let world = World::shared_through(proxy.port(), PostgresConfig::through_transaction_pooler).await;
    world.run().await.unwrap();
    world.transact().await.unwrap();
    for _ in 0..2 {
        proxy.end_all(Ended::Closed);
        let clients = fill(pooler.url(), 6).await;
        all_refuse(&world.store, FULL).await;
        let error = world.store.peek(&request().id).await.unwrap_err();
        assert!(!tells_what_to_call(&error), "{error}");
        empty(clients).await;
        // The pooler needs a moment to notice.
        eventually("verbs are answered again", async || world.run().await.ok()).await;
        eventually("transactions are", async || world.transact().await.ok()).await;
    }
    world.is_whole().await;
}

#[tokio::test]
async fn a_pooler_that_is_full_is_not_taken_for_one_that_takes_no_options() {
    let server = idem_servers::postgres_url();
    let pooler = PgBouncer::start_with(&server, 4, &["max_client_conn = 2"]).unwrap();
    let clients = fill(pooler.url(), 2).await;
    for through in [false, true] {
        let config = PostgresConfig::new(pooler.url());
        let config = if through { config.through_transaction_pooler() } else { config };
        let error = PostgresStore::open(config).await.unwrap_err();
        is_outage("open", &error, FULL);
        assert_eq!(tells_what_to_call(&error), !through, "{error}");
    }
    empty(clients).await;
    let error = eventually("a place is free", async || {
        let error = PostgresStore::open(PostgresConfig::new(pooler.url())).await.unwrap_err();
        (!error.to_string().contains(FULL)).then_some(error)
    });
    let error = error.await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "it takes no options: {error:?}");
    assert!(error.to_string().contains("through_transaction_pooler()"), "{error}");
}

#[tokio::test]
async fn a_pooler_that_becomes_full_while_a_store_is_opened_is_not_taken_for_one_that_takes_no_options() {
    let server = idem_servers::postgres_url();
    let pooler = PgBouncer::start_with(&server, 4, &["max_client_conn = 1"]).unwrap();
    let clients = fill(pooler.url(), 1).await;
    let (schema, proxy) = (Schema::new(), Proxy::<Losses>::to_port(port_of(&server)).await.unwrap());
    let open = PostgresStore::open(schema.config_at(&at_port(proxy.port())));
    // The first connection is there, and all further ones meet the pooler.
    let fills = async {
        eventually("the first connection asks something", async || (proxy.statements() > 0).then_some(())).await;
        proxy.lead_to(port_of(pooler.url()));
    };
    let (opened, ()) = tokio::join!(open, fills);
    is_outage("open", &opened.unwrap_err(), FULL);
    empty(clients).await;
}

/// Makes the server ask for a password from this one role.
async fn ask_for_passwords(admin: &mut PgConnection, role: &str) {
    let rules = format!(
        "DO $$ BEGIN EXECUTE format('COPY (VALUES (''host all {role} all scram-sha-256''), (''host all all all trust''),
             (''local all all trust'')) TO %L', current_setting('hba_file')); END $$"
    );
    sql(admin, rules).await;
    sql(admin, "SELECT pg_reload_conf()").await;
}

#[tokio::test]
async fn a_password_that_is_rotated_is_an_outage_until_it_is_the_one_again() {
    let postgres = Postgres::start().unwrap();
    let mut admin = connect(&postgres.url()).await.unwrap();
    sql(&mut admin, "CREATE ROLE app LOGIN PASSWORD 'one';GRANT CREATE ON DATABASE postgres TO app").await;
    ask_for_passwords(&mut admin, "app").await;
    let options: PgConnectOptions = at_port(postgres.port()).parse().unwrap();
    let wrong = PostgresConfig::from_options(options.clone().username("app").password("two"));
    // The server takes a moment to read its rules.
    let error = loop {
        match PostgresStore::open(wrong.clone()).await {
            Err(error) => break error,
            Ok(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("password authentication failed"), "{error}");
    let right = PostgresConfig::from_options(options.username("app").password("one"));
    let store = PostgresStore::open(right).await.unwrap();
    for _ in 0..2 {
        works(&store).await;
        let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'";
        sql(&mut admin, format!("ALTER ROLE app PASSWORD 'two';{terminate}")).await;
        all_refuse(&store, "password authentication failed").await;
        sql(&mut admin, "ALTER ROLE app PASSWORD 'one'").await;
    }
    works(&store).await;
}

/// The first verb and the first transaction.
async fn works(store: &PostgresStore) {
    let idem_core::AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
    let released = store.settle(&lease, &idem_core::Settlement::Released, idem_testkit::fixture::KEPT).await.unwrap();
    assert_eq!(released, idem_core::OwnerOutcome::Applied);
    let begun = idem_core::TransactionalStore::begin(store, &transactional()).await.unwrap();
    assert!(matches!(begun, idem_core::Begin::Acquired { .. }), "{begun:?}");
    store.purge(10.try_into().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_privilege_that_is_revoked_is_an_outage_until_it_is_granted_again() {
    let schema = Schema::new();
    PostgresStore::open(schema.config()).await.unwrap();
    let (role, mut admin) = (format!("{}_app", schema.name), connection().await);
    let name = &schema.name;
    let rights = format!("SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name}");
    let grants = format!("CREATE ROLE {role} LOGIN;GRANT USAGE ON SCHEMA {name} TO {role};GRANT {rights} TO {role}");
    sql(&mut admin, grants).await;
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let config = || PostgresConfig::from_options(options.clone().username(&role)).schema(name).without_migrating();
    let store = PostgresStore::open(config()).await.unwrap();
    works(&store).await;
    for (revoke, grant) in [
        (format!("REVOKE {rights} FROM {role}"), format!("GRANT {rights} TO {role}")),
        (format!("REVOKE USAGE ON SCHEMA {name} FROM {role}"), format!("GRANT USAGE ON SCHEMA {name} TO {role}")),
    ] {
        sql(&mut admin, revoke).await;
        all_refuse(&store, "permission denied").await;
        let error = PostgresStore::open(config()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "when it is opened that is certain: {error:?}");
        sql(&mut admin, grant).await;
        works(&store).await;
    }
    drop(store);
    sql(&mut admin, format!("DROP OWNED BY {role};DROP ROLE {role}")).await;
}
