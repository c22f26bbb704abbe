//! Connections that end after each so many bytes of a verb's exchange: the verb takes effect once, and no error denies it.

use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use idem_core::{Acquire, AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, StoreError};
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_proxy::{Cut, Cuts, Direction, Ending, Proxy};
use idem_testkit::fixture::{KEPT, completed, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::settling::payment;
use crate::support::{Emulator, Table, client};

/// A prime number, so that the cuts of several exchanges meet other bytes.
const EVERY: usize = 97;

struct World {
    table: Table,
    proxy: Proxy<Cuts>,
    /// Through the proxy.
    store: DynamoStore,
}

impl World {
    async fn new() -> Self {
        let table = Table::new(Emulator::Dynoxide).await;
        let port = Emulator::Dynoxide.url().rsplit_once(':').unwrap().1.parse().unwrap();
        let proxy = Proxy::start("127.0.0.1", port, Cuts::default()).await.unwrap();
        let behind = client(&format!("http://127.0.0.1:{}", proxy.port()));
        let soon = RetryConfig::standard().with_initial_backoff(Duration::from_millis(5));
        let behind = Client::from_conf(behind.config().to_builder().retry_config(soon).build());
        let store = DynamoStore::open(DynamoConfig::new(behind, &table.name)).await.unwrap();
        Self { table, proxy, store }
    }

    /// Cuts an exchange at all places, and returns how many there were.
    async fn cut_everywhere(&self, mut exchange: impl AsyncFnMut(&Self, Option<Cut>) -> bool) -> usize {
        let mut cuts = 0;
        for direction in [Direction::Requests, Direction::Answers] {
            for ending in [Ending::Reset, Ending::Close] {
                let mut after = 0;
                while exchange(self, Some(Cut { direction, after, ending })).await {
                    (after, cuts) = (after + EVERY, cuts + 1);
                }
            }
        }
        assert!(!exchange(self, None).await);
        cuts
    }

    async fn lease(&self, request: &Acquire) -> Lease {
        match self.store.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }
}

/// Asserts that an error does not deny what was done.
fn assert_honest<T>(told: &Result<T, StoreError>, is_done: bool, cut: Option<Cut>) {
    match told {
        Ok(_) => assert!(is_done, "{cut:?}: told done"),
        Err(error) => assert!(!is_done || error.is_indeterminate(), "{cut:?}: told not done: {error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_is_cut_is_one_acquire() {
    let world = World::new().await;
    let cuts = world.cut_everywhere(async |world, cut| {
        let request = request();
        world.proxy.arm(cut);
        let told = world.store.acquire(&request).await;
        let is_cut = world.proxy.disarm();
        assert_honest(&told, world.store.peek(&request.id).await.unwrap().is_some(), cut);
        assert_eq!(world.lease(&request).await.attempt, 1, "{cut:?}");
        is_cut
    });
    let cuts = cuts.await;
    assert!(cuts > 20, "an exchange is larger than that: {cuts}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_is_cut_is_one_settlement() {
    let world = World::new().await;
    let cuts = world.cut_everywhere(async |world, cut| {
        let lease = world.lease(&request()).await;
        world.proxy.arm(cut);
        let told = world.store.settle(&lease, &completed(), KEPT).await;
        let is_cut = world.proxy.disarm();
        assert_honest(&told, world.store.peek(&lease.id).await.unwrap().unwrap().replay().is_some(), cut);
        assert_eq!(world.store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied, "{cut:?}");
        is_cut
    });
    let cuts = cuts.await;
    assert!(cuts > 20, "an exchange is larger than that: {cuts}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_are_written_once_with_their_answer_wherever_the_exchange_is_cut() {
    let world = World::new().await;
    let mut number = 0;
    let cuts = world.cut_everywhere(async |world, cut| {
        number += 1;
        let lease = world.lease(&request()).await;
        let items = || vec![payment(&world.table, &format!("{number}"))];
        world.proxy.arm(cut);
        let told = world.store.settle_with(&lease, &completed(), KEPT, items()).await;
        let is_cut = world.proxy.disarm();
        let is_done = world.store.peek(&lease.id).await.unwrap().unwrap().replay().is_some();
        assert_honest(&told, is_done, cut);
        let again = world.store.settle_with(&lease, &completed(), KEPT, items()).await.unwrap();
        assert_eq!(again, if is_done { OwnerOutcome::LeaseLost } else { OwnerOutcome::Applied }, "{cut:?}");
        is_cut
    });
    let cuts = cuts.await;
    assert!(cuts > 20, "an exchange is larger than that: {cuts}");
    assert_eq!(world.table.items("payment/").await, number);
}

/// The client would repeat the request, meet a limit, and return that alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_whose_answer_is_lost_is_not_told_as_refused_by_the_next_answer() {
    let world = World::new().await;
    let limit = limited().await;
    let request = request();
    world.proxy.arm(Some(Cut { direction: Direction::Answers, after: 0, ending: Ending::Close }));
    let (told, ()) = tokio::join!(world.store.acquire(&request), async {
        while !world.proxy.is_cut() {
            tokio::task::yield_now().await;
        }
        world.proxy.lead_to(limit);
    });
    let error = told.unwrap_err();
    assert!(error.is_indeterminate(), "{error:?}");
    let direct = world.table.store().await;
    assert!(direct.peek(&request.id).await.unwrap().is_some(), "it was acquired");
}

/// The port of a service that refuses everything for the moment.
async fn limited() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
                    let body = r#"{"__type":"com.amazonaws.dynamodb.v20120810#ThrottlingException","message":"wait"}"#;
                    let head = format!("HTTP/1.1 400 Bad Request\r\ncontent-length: {}\r\n\r\n", body.len());
                    let _ = stream.write_all((head + body).as_bytes()).await;
                }
            });
        }
    });
    port
}
