use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// Starts a server that sends its name to each client. Its connections end with its task.
async fn server(name: &'static [u8; 3]) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            stream.write_all(name).await.unwrap();
            connections.push(stream);
        }
    });
    (port, task)
}

async fn client(proxy: &Proxy<Partition>) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await.unwrap()
}

/// What a client reads next: three bytes, or the end of its connection.
async fn heard(client: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    timeout(PATIENCE, client.take(3).read_to_end(&mut bytes)).await.unwrap().unwrap();
    bytes
}

#[tokio::test]
async fn nobody_learns_of_the_end_of_a_server_before_the_failover() {
    let ((old, task), (new, _other)) = (server(b"old").await, server(b"new").await);
    let proxy = Proxy::<Partition>::to_port(old).await.unwrap();
    let mut first = client(&proxy).await;
    assert_eq!(heard(&mut first).await, b"old");
    proxy.cut();
    task.abort();
    let mut second = client(&proxy).await;
    let silence = Duration::from_millis(200);
    assert!(timeout(silence, first.read_u8()).await.is_err(), "it learned of the end");
    assert!(timeout(silence, second.read_u8()).await.is_err(), "it learned of the end");
    proxy.fail_over(new);
    assert_eq!(heard(&mut first).await, b"", "it is cut off");
    assert_eq!(heard(&mut second).await, b"new");
}
