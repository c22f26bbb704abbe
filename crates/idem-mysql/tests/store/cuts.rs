//! Connections that end after each so many bytes of a transaction's end: what the store then says is what the database holds.

use futures_util::future::join_all;
use idem_core::{
    AcquireOutcome, Begin, IdempotencyStore as _, OwnerOutcome, Settlement, TransactionalStore as _, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_proxy::{Cut, Cuts, Direction, Ended, Ending, Proxy};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, completed, request};

use crate::support::{Database, number, sql};

/// A prime number, so that the cuts of several exchanges meet other bytes.
const EVERY: usize = 83;

struct World {
    database: Database,
    proxy: Proxy<Cuts>,
    store: MySqlStore,
}

impl World {
    async fn new() -> Self {
        Self::of(Database::new().await).await
    }

    async fn of(database: Database) -> Self {
        let port = database.url().rsplit_once(':').unwrap().1.split('/').next().unwrap().parse().unwrap();
        let proxy = Proxy::start("127.0.0.1", port, Cuts::default()).await.unwrap();
        let url = format!("mysql://root@127.0.0.1:{}/{}", proxy.port(), database.name);
        let store = MySqlStore::open(MySqlConfig::new(url)).await.unwrap();
        sql(&mut database.connection().await, "CREATE TABLE effects (id BINARY(32) PRIMARY KEY)").await;
        Self { database, proxy, store }
    }

    /// Ends a transaction with one write, cut as told. Returns whether it was cut.
    async fn end(&self, cut: Option<Cut>, settlement: &Settlement) -> bool {
        let request = request();
        let begun = self.store.begin(&request).await.unwrap();
        let Begin::Acquired { mut transaction, .. } = begun else { panic!("{begun:?}") };
        let id: String = request.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
        sql(connection, format!("INSERT INTO effects VALUES (x'{id}')")).await;
        self.proxy.arm(cut);
        let told = transaction.finish(settlement, KEPT, Writes::Keep).await;
        let is_cut = self.proxy.disarm();
        let mut connection = self.database.connection().await;
        // A locking read waits for what is under way.
        let count = format!("SELECT COUNT(*) FROM effects WHERE id = x'{id}' FOR UPDATE");
        let effect = number(&mut connection, count).await;
        let in_progress = format!("SELECT COUNT(*) FROM idem_records WHERE id = x'{id}' AND state = 1 FOR UPDATE");
        let settled = 1 - number(&mut connection, in_progress).await;
        assert_eq!(effect, settled, "{cut:?}: the write and the record went apart");
        match &told {
            Ok(OwnerOutcome::Applied) => assert_eq!(settled, 1, "{cut:?}: told done"),
            Ok(OwnerOutcome::LeaseLost) => panic!("{cut:?}: no other run has the lease"),
            Err(error) if error.is_indeterminate() => {
                assert_eq!(*settlement, Settlement::Released, "{cut:?}: it can be found out: {error:?}");
            }
            Err(error) => assert_eq!(settled, 0, "{cut:?}: told not done: {error:?}"),
        }
        is_cut
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_whose_end_is_cut_is_committed_or_not_as_told() {
    let world = World::new().await;
    for settlement in [completed(), Settlement::Released] {
        let mut cuts = 0;
        for direction in [Direction::Requests, Direction::Answers] {
            for ending in [Ending::Reset, Ending::Close] {
                let mut after = 0;
                while world.end(Some(Cut { direction, after, ending }), &settlement).await {
                    (after, cuts) = (after + EVERY, cuts + 1);
                }
            }
        }
        println!("{cuts} cuts");
        assert!(cuts >= 40, "the exchange is larger than that: {cuts}");
        assert!(!world.end(None, &settlement).await);
    }
}

/// The same for a verb. After a batch that was cut, the store repeats the verb with the same token, and finds out whether it was done.
/// The last bytes are those around COMMIT.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_is_cut_is_repeated() {
    const LAST: usize = 40;
    let world = World::new().await;
    let leased = async || match world.store.acquire(&request()).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    };
    let mut exchanges = Vec::new();
    for _ in 0..5 {
        let lease = leased().await;
        // The connection goes back to its pool in a task. Without it, the exchange would begin with a new one.
        world.proxy.quiet().await;
        world.proxy.arm(None);
        world.store.settle(&lease, &completed(), KEPT).await.unwrap();
        exchanges.push([Direction::Requests, Direction::Answers].map(|direction| world.proxy.carried(direction)));
    }
    let shortest = |at: usize| exchanges.iter().map(|bytes| bytes[at]).min().unwrap();
    let carried = [(Direction::Requests, shortest(0)), (Direction::Answers, shortest(1))];
    let mut found_out = 0;
    for (direction, bytes) in carried {
        for after in (0..bytes - LAST).step_by(EVERY).chain((bytes - LAST..bytes).step_by(5)) {
            let lease = leased().await;
            world.proxy.quiet().await;
            world.proxy.arm(Some(Cut { direction, after, ending: Ending::Reset }));
            let told = world.store.settle(&lease, &completed(), KEPT).await;
            let is_cut = world.proxy.disarm();
            let record = world.store.peek(&lease.id).await.unwrap().unwrap();
            match told {
                Ok(_) => {
                    assert!(record.replay().is_some(), "{direction:?} {after}: told done");
                    found_out += usize::from(is_cut);
                }
                Err(error) if error.is_indeterminate() => {}
                Err(error) => assert!(record.replay().is_none(), "{direction:?} {after}: told not done: {error:?}"),
            }
            assert_eq!(world.store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
        }
    }
    assert!(found_out > 20, "the exchange has more cuts than that: {found_out}");
}

/// The server goes on with a COMMIT whose client is gone: here it waits for a replica until its time limit. Until it is done, the
/// store must not say that nothing was committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_ends_after_its_connection_is_awaited() {
    let options = ["--log-bin", "--rpl-semi-sync-master-wait-point=AFTER_SYNC"];
    let server: &'static MariaDb = Box::leak(Box::new(MariaDb::start_unsynced(&options).unwrap()));
    let world = World::of(Database::on(server).await).await;
    let begun = world.store.begin(&request()).await.unwrap();
    let Begin::Acquired { mut transaction, .. } = begun else { panic!("{begun:?}") };
    let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
    sql(connection, "INSERT INTO effects VALUES (x'01')").await;
    let mut watch = world.database.connection().await;
    let wait = "SET GLOBAL rpl_semi_sync_master_timeout = 2000, rpl_semi_sync_master_enabled = ON";
    sql(&mut watch, wait).await;
    let finish = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
    let waiting = "SELECT COUNT(*) FROM information_schema.processlist WHERE state LIKE '%semi-sync%'";
    while number(&mut watch, waiting).await == 0 {
        assert!(!finish.is_finished(), "COMMIT does not wait");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    world.proxy.end_all(Ended::ClientReset);
    assert_eq!(finish.await.unwrap().unwrap(), OwnerOutcome::Applied);
    assert_eq!(number(&mut watch, "SELECT COUNT(*) FROM effects").await, 1);
}

/// After a restart of the server, a pool has only connections that have ended.
#[tokio::test]
async fn verbs_go_on_when_all_connections_of_the_pool_have_ended() {
    let world = World::new().await;
    for _ in 0..3 {
        let acquires = (0..16).map(|_| async { world.store.acquire(&request()).await.map(drop) });
        for acquired in join_all(acquires).await {
            acquired.unwrap();
        }
        world.proxy.end_all(Ended::Reset);
        // At once, so that the connections are not tried first.
        let AcquireOutcome::Acquired(lease) = world.store.acquire(&request()).await.unwrap() else { panic!() };
        world.proxy.end_all(Ended::Reset);
        world.store.settle(&lease, &completed(), KEPT).await.unwrap();
    }
}
