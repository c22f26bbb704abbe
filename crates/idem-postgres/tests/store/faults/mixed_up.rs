//! A pooler that gives a client the end of an answer for which another client had asked. PgBouncer 1.18 does so when a client dies
//! at the wrong moment. From then on, each answer on that connection is the one to the message before.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore as _, Lease, Settlement, StoreError, StoredResponse, Writes,
};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_proxy::{Ended, Harm, Proxy};
use idem_testkit::fixture::{KEPT, repeat_of, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::world::{World, at_port, eventually, port_of_shared, transactional};

/// Sends the end of an answer ahead of the answer to the next transactions.
#[derive(Debug, Default)]
struct MixedUp(AtomicUsize);

/// `ReadyForQuery`, outside of a transaction.
const END: &[u8] = b"Z\0\0\0\x05I";

impl MixedUp {
    fn next(&self, transactions: usize) {
        self.0.store(transactions, Ordering::SeqCst);
    }

    fn is_done(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}

impl Harm for MixedUp {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let (mut question, mut answer) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        loop {
            tokio::select! {
                read = from_client.read(&mut question) => {
                    let message = &question[..read?];
                    if message.is_empty() {
                        return Ok(Ended::Closed);
                    }
                    let begins = message[0] == b'Q' && message[5..].starts_with(b"BEGIN");
                    let one_less = |left: usize| left.checked_sub(1);
                    if begins && self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
                        to_client.write_all(END).await?;
                    }
                    to_server.write_all(message).await?;
                }
                read = from_server.read(&mut answer) => match read? {
                    0 => return Ok(Ended::Closed),
                    read => to_client.write_all(&answer[..read]).await?,
                },
            }
        }
    }
}

async fn world() -> (Proxy<MixedUp>, World) {
    let proxy = Proxy::<MixedUp>::to_port(port_of_shared()).await.unwrap();
    let world = World::shared_through(proxy.port(), PostgresConfig::through_transaction_pooler).await;
    (proxy, world)
}

/// The answer to a verb that may be repeated.
async fn answered<T>(verb: impl AsyncFn() -> Result<T, StoreError>) -> T {
    eventually("an answer", async || verb().await.ok()).await
}

async fn lease(world: &World, request: &Acquire) -> Lease {
    match answered(async || world.store.acquire(request).await).await {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn no_verb_gets_the_answer_to_another() {
    let (proxy, world) = world().await;
    for round in 0..20_usize {
        let requests = [request(), request()];
        proxy.next(round % 3);
        let leases = [lease(&world, &requests[0]).await, lease(&world, &requests[1]).await];
        for (place, lease) in leases.iter().enumerate() {
            assert_eq!((lease.id, lease.attempt), (requests[place].id, 1), "round {round}");
            let settlement = Settlement::Completed(StoredResponse::new(201, format!("{round} {place}")));
            proxy.next(place);
            let settle = async || world.store.settle(lease, &settlement, KEPT).await;
            assert_eq!(answered(settle).await, idem_core::OwnerOutcome::Applied, "round {round}");
        }
        proxy.next(1 + round % 2);
        for (place, request) in requests.iter().enumerate() {
            let repeat = repeat_of(request);
            let replay = answered(async || world.store.acquire(&repeat).await).await;
            let AcquireOutcome::Replay(replay) = replay else { panic!("round {round}: {replay:?}") };
            assert_eq!(replay.response, StoredResponse::new(201, format!("{round} {place}")));
        }
        assert!(proxy.is_done(), "round {round}");
    }
}

#[tokio::test]
async fn no_transaction_begins_by_the_answer_to_another() {
    let (proxy, world) = world().await;
    for round in 0..10_usize {
        let requests = [transactional(), transactional()];
        for (place, request) in requests.iter().enumerate() {
            proxy.next(1);
            // The session that was given up holds the lock of the operation for a moment.
            let mut transaction = world.begin_when_free(request).await;
            assert!(transaction.as_any_mut().is::<PostgresTransaction>());
            let settlement = Settlement::Completed(StoredResponse::new(201, format!("{round} {place}")));
            transaction.finish(&settlement, KEPT, Writes::Keep).await.unwrap();
        }
        for (place, request) in requests.iter().enumerate() {
            proxy.next(1);
            let begin = async || idem_core::TransactionalStore::begin(&world.store, &repeat_of(request)).await;
            let idem_core::Begin::Answered(AcquireOutcome::Replay(replay)) = answered(begin).await else { panic!() };
            assert_eq!(replay.response, StoredResponse::new(201, format!("{round} {place}")));
        }
        assert!(proxy.is_done(), "round {round}");
    }
}

#[tokio::test]
async fn a_store_opens_all_the_same() {
    let (proxy, world) = world().await;
    let config = || {
        let config = PostgresConfig::new(at_port(proxy.port())).schema(world.name.clone());
        config.through_transaction_pooler().migration_wait(Duration::from_secs(5))
    };
    for times in [1, 2] {
        proxy.next(times);
        PostgresStore::open(config()).await.unwrap();
        assert!(proxy.is_done());
    }
}
