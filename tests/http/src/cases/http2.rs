//! The same over HTTP/2, with prior knowledge.

use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::target::Target;

/// Sends a payment; dropping both handles resets the stream.
async fn begin(target: &Target, simulate: &str) -> (h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    let stream = tokio::net::TcpStream::connect(target.address()).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://{}/v1/payments", target.address()))
        .header("authorization", format!("Bearer {}", target.tenant()))
        .header("content-type", "application/json")
        .header("idempotency-key", "k")
        .header("x-simulate", simulate)
        .body(())
        .unwrap();
    let mut client = client.ready().await.unwrap();
    let (response, mut send) = client.send_request(request, false).unwrap();
    send.send_data(Bytes::from_static(crate::PAYMENT.as_bytes()), true).unwrap();
    (response, send)
}

pub(super) fn http_2_gets_the_same_answers(target: &Target) {
    let runtime = Runtime::new().unwrap();
    let over_http_2 = || {
        runtime.block_on(async {
            let (response, _send) = begin(target, "").await;
            let (head, mut body) = response.await.unwrap().into_parts();
            let mut bytes = Vec::new();
            while let Some(chunk) = body.data().await {
                bytes.extend(chunk.unwrap());
            }
            (head.status.as_u16(), head.headers.contains_key("idempotency-replayed"), bytes)
        })
    };
    let (first, again) = (over_http_2(), over_http_2());
    assert_eq!((first.0, first.1), (201, false));
    assert_eq!((again.0, again.1), (201, true));
    assert_eq!(first.2, again.2);
    let over_http_1 = target.send(&target.pay("k"));
    assert!(over_http_1.is_replay());
    assert_eq!(over_http_1.body, first.2);
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_http_2_stream_that_is_reset_finds_its_payment_made_once(target: &Target) {
    let runtime = Runtime::new().unwrap();
    let (mut response, send) = runtime.block_on(begin(target, "hold-before"));
    target.await_run();
    runtime.block_on(async {
        // The request is under way: there is no response yet.
        assert!(tokio::time::timeout(Duration::from_millis(1), &mut response).await.is_err());
    });
    drop((response, send));
    target.stays_held();
    target.release();
    let retry = target.send(&target.pay("k").waiting());
    assert_eq!((retry.status, retry.is_replay(), target.effects()), (201, true, 1));
}
