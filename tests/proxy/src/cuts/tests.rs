//! Tests with an echo server behind the proxy.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpListener;

use super::*;
use crate::Proxy;

const PATIENCE: Duration = Duration::from_secs(20);

/// Starts the server. Returns its port, and the count of received bytes.
async fn server() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let received = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&received);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let mut buffer = [0; 100];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    count.fetch_add(read, Ordering::SeqCst);
                    if stream.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, received)
}

/// A connection that has been used.
async fn warm(proxy: &Proxy<Cuts>) -> TcpStream {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await.unwrap();
    assert_eq!(ask(&mut stream, b"warm").await.len(), 4);
    proxy.quiet().await;
    stream
}

/// Sends bytes and returns what comes back, until everything has come or the connection has ended.
async fn ask(stream: &mut TcpStream, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    let mut byte = [0];
    if stream.write_all(bytes).await.is_ok() {
        while answer.len() < bytes.len()
            && let Ok(1) = tokio::time::timeout(PATIENCE, stream.read(&mut byte)).await.unwrap()
        {
            answer.push(byte[0]);
        }
    }
    answer
}

#[tokio::test]
async fn a_cut_counts_from_when_it_was_armed_in_its_direction() {
    let (port, received) = server().await;
    let proxy = Proxy::<Cuts>::to_port(port).await.unwrap();
    for ending in [Ending::Reset, Ending::Close, Ending::Outage] {
        for after in 0..=3 {
            for direction in [Direction::Requests, Direction::Answers] {
                let mut stream = warm(&proxy).await;
                let before = received.load(Ordering::SeqCst);
                proxy.arm(Some(Cut { direction, after, ending }));
                let answer = ask(&mut stream, b"three").await;
                assert!(proxy.disarm());
                // The count of carried bytes is exact; the end of the connection may overtake them.
                assert_eq!(proxy.carried(direction), after);
                assert!(b"three"[..after].starts_with(&answer), "{answer:?}");
                if direction == Direction::Answers {
                    assert_eq!(received.load(Ordering::SeqCst) - before, 5, "the request was delivered");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_cut_is_made_once() {
    let (port, _) = server().await;
    let proxy = Proxy::<Cuts>::to_port(port).await.unwrap();
    let (mut first, mut second) = (warm(&proxy).await, warm(&proxy).await);
    proxy.arm(Some(Cut { direction: Direction::Requests, after: 2, ending: Ending::Reset }));
    ask(&mut first, b"first").await;
    assert_eq!(ask(&mut second, b"second").await, b"second");
    assert!(proxy.disarm());
    proxy.arm(Some(Cut { direction: Direction::Requests, after: 7, ending: Ending::Reset }));
    assert_eq!(ask(&mut second, b"second").await, b"second");
    assert!(!proxy.disarm(), "the exchange was shorter");
}

#[tokio::test]
async fn an_outage_ends_all_connections_and_refuses_the_next_one() {
    let (port, _) = server().await;
    let proxy = Proxy::<Cuts>::to_port(port).await.unwrap();
    let (mut first, mut second) = (warm(&proxy).await, warm(&proxy).await);
    proxy.arm(Some(Cut { direction: Direction::Answers, after: 0, ending: Ending::Outage }));
    assert_eq!(ask(&mut first, b"first").await, b"");
    proxy.quiet().await;
    assert_eq!(ask(&mut second, b"second").await, b"");
    let mut refused = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await.unwrap();
    assert_eq!(ask(&mut refused, b"third").await, b"");
    warm(&proxy).await;
}
