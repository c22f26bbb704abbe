//! Tests with a server behind the proxy that echoes lines.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;

use super::*;
use crate::Proxy;

const PATIENCE: Duration = Duration::from_secs(20);

/// Starts the server. Returns its port, and the lines that it received.
async fn server() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let log = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let log = Arc::clone(&log);
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let mut line = String::new();
                while stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
                    log.lock().unwrap().push(line.clone());
                    if stream.write_all(line.as_bytes()).await.is_err() {
                        return;
                    }
                    line.clear();
                }
            });
        }
    });
    (port, asked)
}

/// Sends a line and returns what comes back, until the end of the connection or of the line.
async fn ask(proxy: &Proxy<Network>, line: &str) -> io::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await?);
    stream.write_all(line.as_bytes()).await?;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_line(&mut answer)).await.unwrap()?;
    Ok(answer)
}

#[tokio::test]
async fn in_clear_weather_and_with_a_delay_everything_arrives() {
    let (port, _) = server().await;
    let proxy = Proxy::<Network>::to_port(port).await.unwrap();
    assert_eq!(ask(&proxy, "one\n").await.unwrap(), "one\n");
    proxy.weather(Weather::Delay(Duration::from_millis(100)));
    let began = std::time::Instant::now();
    assert_eq!(ask(&proxy, "two\n").await.unwrap(), "two\n");
    assert!(began.elapsed() >= Duration::from_millis(200), "both ways");
    assert_eq!(proxy.harmed(), 0);
}

#[tokio::test]
async fn a_reset_keeps_the_request_from_the_server() {
    let (port, asked) = server().await;
    let proxy = Proxy::<Network>::to_port(port).await.unwrap();
    proxy.weather(Weather::Reset);
    assert!(ask(&proxy, "one\n").await.is_err());
    assert!(asked.lock().unwrap().is_empty());
    proxy.weather(Weather::Clear);
    assert_eq!(ask(&proxy, "two\n").await.unwrap(), "two\n");
    assert_eq!(proxy.harmed(), 1);
}

#[tokio::test]
async fn a_dropped_answer_is_one_to_a_request_that_was_delivered() {
    let (port, asked) = server().await;
    let proxy = Proxy::<Network>::to_port(port).await.unwrap();
    proxy.weather(Weather::DropAnswer);
    assert!(ask(&proxy, "one\n").await.is_err());
    assert_eq!(*asked.lock().unwrap(), ["one\n"]);
    assert_eq!(proxy.harmed(), 1);
}

#[tokio::test]
async fn a_cut_answer_has_as_many_bytes_as_were_said() {
    let (port, _) = server().await;
    let proxy = Proxy::<Network>::to_port(port).await.unwrap();
    proxy.weather(Weather::CutAfter(2));
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await.unwrap();
    stream.write_all(b"three\n").await.unwrap();
    let mut got = Vec::new();
    let mut byte = [0];
    while let Ok(1) = tokio::time::timeout(PATIENCE, stream.read(&mut byte)).await.unwrap() {
        got.push(byte[0]);
    }
    // A reset may overtake earlier bytes.
    assert!(b"th".starts_with(&got), "{got:?}");
    assert_eq!(proxy.harmed(), 1);
}

#[tokio::test]
async fn a_half_close_is_the_end_of_what_a_client_can_read() {
    let (port, asked) = server().await;
    let proxy = Proxy::<Network>::to_port(port).await.unwrap();
    proxy.weather(Weather::HalfClose);
    assert_eq!(ask(&proxy, "one\n").await.unwrap(), "");
    assert_eq!(*asked.lock().unwrap(), ["one\n"]);
}

#[tokio::test]
async fn what_fell_into_a_black_hole_arrives_when_it_is_over() {
    let (port, asked) = server().await;
    let proxy = Arc::new(Proxy::<Network>::to_port(port).await.unwrap());
    proxy.weather(Weather::BlackHole);
    let waiting = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move { ask(&proxy, "one\n").await.unwrap() }
    });
    while proxy.harmed() == 0 {
        tokio::task::yield_now().await;
    }
    assert!(asked.lock().unwrap().is_empty());
    proxy.weather(Weather::Clear);
    assert_eq!(waiting.await.unwrap(), "one\n");
}

#[tokio::test]
async fn new_connections_lead_where_they_are_told_to() {
    let ((one, asked_one), (other, asked_other)) = (server().await, server().await);
    let proxy = Proxy::<Network>::to_port(one).await.unwrap();
    ask(&proxy, "one\n").await.unwrap();
    proxy.lead_to(other);
    ask(&proxy, "two\n").await.unwrap();
    assert_eq!((asked_one.lock().unwrap().len(), asked_other.lock().unwrap().len()), (1, 1));
}
