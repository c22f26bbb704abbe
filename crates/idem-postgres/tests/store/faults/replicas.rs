//! Replicas are refused, and a failover to one that was promoted needs nothing but the same address.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use idem_core::{AcquireOutcome, Begin, IdempotencyStore, StoreErrorKind, TransactionalStore, Writes};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_servers::{Postgres, find_program};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::postgres::PgConnectOptions;
use sqlx::{PgConnection, Row as _};

use crate::support::{Configure as _, Schema, number};
use crate::world::{World, at_port, connect, eventually, port_of_shared, sql, transactional};
use idem_proxy::Proxy;
use idem_proxy::postgres::Losses;

/// Makes a standby, runs it until its standard input ends, and removes it.
const STANDBY: &str = r#"trap : HUP INT TERM
"$1" --pgdata="$4/data" --host=127.0.0.1 --port="$2" --username=postgres --checkpoint=fast --no-sync -R >"$4/log" 2>&1
chmod 700 "$4/data"; "${1%/*}/postgres" -D "$4/data" -k "$4" -p "$3" -c listen_addresses=127.0.0.1 -c max_connections=200 >>"$4/log" 2>&1 &
read -r end; kill -s QUIT $!; wait $!; rm -rf "$4""#;

struct Standby {
    url: String,
    port: u16,
    keeper: Child,
}

impl Standby {
    /// `None` where the primary runs in a container, out of the reach of this machine's programs.
    async fn of(primary: &Postgres) -> Option<Self> {
        if primary.origin().starts_with("container") {
            return None;
        }
        let mut beside = connect(&primary.url()).await.unwrap();
        let data: String = sql(&mut beside, "SHOW data_directory").await.first().unwrap().get(0);
        let owner = Path::new(&data).metadata().unwrap();
        // The wrapper on PATH would lead to another folder than that of the server.
        let binaries =
            primary.origin().rsplit_once(" from ").map(|(_, folder)| Path::new(folder).join("pg_basebackup"));
        let backup = binaries.filter(|program| program.is_file()).or_else(|| find_program("pg_basebackup")).unwrap();
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let folder = format!("{data}.standby");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("mkdir -m 700 \"$4\"; {STANDBY}"), "keeper"]).arg(backup);
        command.args([primary.port().to_string(), port.to_string(), folder]);
        command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        if owner.uid() != std::fs::metadata("/proc/self").map_or(owner.uid(), |process| process.uid()) {
            command.uid(owner.uid()).gid(owner.gid());
        }
        let keeper = command.spawn().unwrap();
        let standby = Self { url: at_port(port), port, keeper };
        eventually("the standby answers", async || connect(&standby.url).await.ok()).await;
        Some(standby)
    }

    async fn connect(&self) -> PgConnection {
        connect(&self.url).await.unwrap()
    }

    /// Waits until it has everything that the primary has.
    async fn catch_up(&self, primary: &World) {
        let position = "SELECT (pg_current_wal_lsn() - '0/0')::BIGINT";
        let position = primary.number(position).await;
        let mut beside = self.connect().await;
        let replayed = "SELECT (pg_last_wal_replay_lsn() - '0/0')::BIGINT";
        eventually("the standby catches up", async || (number(&mut beside, replayed).await >= position).then_some(()))
            .await;
    }

    async fn promote(&self) {
        assert!(sql(&mut self.connect().await, "SELECT pg_promote()").await.first().unwrap().get::<bool, _>(0));
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_refused_and_takes_over_when_it_is_promoted() {
    let mut primary = Postgres::start().unwrap();
    let Some(standby) = Standby::of(&primary).await else { return };
    let proxy = Proxy::<Losses>::to_port(primary.port()).await.unwrap();
    let mut world = World::private(&at_port(proxy.port()), &primary.url()).await;
    standby.catch_up(&world).await;
    for migrates in [true, false] {
        let config = PostgresConfig::new(&standby.url).schema(&world.name);
        let config = if migrates { config } else { config.without_migrating() };
        let refused = PostgresStore::open(config).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused:?}");
        assert!(refused.to_string().contains("replica"), "{refused}");
    }
    let settled = transactional();
    let mut transaction = world.begin(&settled).await.unwrap();
    world.write(&mut *transaction, &settled.id).await.unwrap();
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    let lease = world.lease(&request()).await.unwrap();
    standby.catch_up(&world).await;
    let lost = transactional();
    let mut running = world.begin(&lost).await.unwrap();
    world.write(&mut *running, &lost.id).await.unwrap();
    primary.kill().unwrap();
    standby.promote().await;
    proxy.lead_to(standby.port);
    world.lead_beside_to(&standby.url);
    // The first of each, with everything that was acknowledged.
    world.settle(&lease).await.unwrap();
    let replay = world.store.begin(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    let error = running.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(world.store.peek(&lost.id).await.unwrap(), None);
    world.writes_and_records_agree().await;
    world.is_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_turns_read_only_is_left_by_the_verb_that_notices() {
    let old = Postgres::start().unwrap();
    let proxy = Proxy::<Losses>::to_port(old.port()).await.unwrap();
    let mut world = World::private(&at_port(proxy.port()), &old.url()).await;
    for _ in 0..4 {
        world.run().await.unwrap();
    }
    let mut demote = connect(&old.url()).await.unwrap();
    sql(&mut demote, "ALTER SYSTEM SET default_transaction_read_only = on").await;
    sql(&mut demote, "SELECT pg_reload_conf()").await;
    let lease = eventually("the server takes no writes", async || world.lease(&request()).await.err()).await;
    assert_eq!(lease.kind(), StoreErrorKind::Unavailable, "{lease:?}");
    assert!(lease.is_retryable() && lease.to_string().contains("replica"), "{lease:?}");
    // The same schema on the server that all tests share stands for the new primary.
    let _schema = OwnSchema(Schema::named(world.name.clone()));
    drop(PostgresStore::open(PostgresConfig::new(idem_servers::postgres_url()).schema(&world.name)).await.unwrap());
    let table = format!("CREATE TABLE {}.effects (number BIGSERIAL PRIMARY KEY, id BYTEA NOT NULL)", world.name);
    proxy.lead_to(port_of_shared());
    world.lead_beside_to(&idem_servers::postgres_url());
    sql(&mut world.beside().await, table).await;
    world.run().await.expect("the first verb stayed with the old primary");
    world.is_whole().await;
}

struct OwnSchema(#[expect(dead_code, reason = "dropped with its value")] Schema);

#[tokio::test]
async fn a_session_that_may_not_write_is_said_to_be_that_of_a_replica() {
    let schema = Schema::new();
    PostgresStore::open(schema.config()).await.unwrap();
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let options = options.options([("default_transaction_read_only", "on")]);
    let config = PostgresConfig::from_options(options).schema(&schema.name);
    let store = PostgresStore::open(config).await.unwrap();
    let error = store.acquire(&request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("it is a replica"), "{error}");
    assert_eq!(store.peek(&request().id).await.unwrap(), None, "it can still be read");
}
