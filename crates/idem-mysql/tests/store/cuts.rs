//! Connections that end after each so many bytes of a transaction's end: what the store then says is what the database holds.

use idem_core::{Begin, IdempotencyStore as _, OwnerOutcome, Settlement, TransactionalStore as _, Writes};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_proxy::{Cut, Cuts, Direction, Ending, Proxy};
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
        let database = Database::new().await;
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
            Ok(OwnerOutcome::LeaseLost) => panic!("{cut:?}: nobody else has the lease"),
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

/// The same for a verb: with the same token it can be repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_is_cut_can_be_repeated() {
    let world = World::new().await;
    let mut cuts = 0;
    for direction in [Direction::Requests, Direction::Answers] {
        for step in 0.. {
            let idem_core::AcquireOutcome::Acquired(lease) = world.store.acquire(&request()).await.unwrap() else {
                panic!()
            };
            world.proxy.arm(Some(Cut { direction, after: step * EVERY, ending: Ending::Reset }));
            let told = world.store.settle(&lease, &completed(), KEPT).await;
            let is_cut = world.proxy.disarm();
            if let Err(error) = &told {
                let record = world.store.peek(&lease.id).await.unwrap().unwrap();
                assert!(error.is_indeterminate() || record.replay().is_none(), "told not done: {error:?}");
            }
            assert_eq!(world.store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
            if !is_cut {
                break;
            }
            cuts += 1;
        }
    }
    println!("{cuts} cuts");
    assert!(cuts >= 10, "{cuts}");
}
