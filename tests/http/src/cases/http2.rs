//! The same over HTTP/2, with prior knowledge.

use bytes::Bytes;
use tokio::runtime::Runtime;

use super::disconnects::await_settlement;
use crate::client::Answer;
use crate::target::Target;

/// A stream that is under way; dropping both handles resets it.
type Stream = (h2::client::ResponseFuture, h2::SendStream<Bytes>);

/// Sends a payment.
async fn begin(target: &Target, key: &str, simulate: &str) -> Stream {
    let (response, mut send) = begin_head(target, key, simulate).await;
    send.send_data(Bytes::from_static(crate::PAYMENT.as_bytes()), true).unwrap();
    (response, send)
}

/// Sends the head of a payment, on a connection of its own.
async fn begin_head(target: &Target, key: &str, simulate: &str) -> Stream {
    let stream = tokio::net::TcpStream::connect(target.address()).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://{}/v1/payments", target.address()))
        .header("authorization", format!("Bearer {}", target.tenant()))
        .header("content-type", "application/json")
        .header("idempotency-key", key)
        .header("x-simulate", simulate)
        .body(())
        .unwrap();
    let mut client = client.ready().await.unwrap();
    client.send_request(request, false).unwrap()
}

pub(super) fn http_2_gets_the_same_answers(target: &Target) {
    let runtime = Runtime::new().unwrap();
    let over_http_2 = |key: &str, simulate: &str| {
        let answer = runtime.block_on(async {
            let (response, _send) = begin(target, key, simulate).await;
            read(response).await
        });
        target.note(answer)
    };
    for simulate in ["", "raw-header", "stream=300000", "stream=0"] {
        let key = format!("k-{simulate}");
        let (first, again) = (over_http_2(&key, simulate), over_http_2(&key, simulate));
        assert_eq!((first.status, first.is_replay(), again.is_replay()), (201, false, true), "{simulate}");
        assert_eq!(again.essence(), first.essence(), "{simulate}");
        let over_http_1 = target.send(&target.pay(&key));
        assert!(over_http_1.is_replay());
        assert_eq!(over_http_1.essence(), first.essence(), "{simulate}");
    }
    assert_eq!(target.effects(), 4);
    // What the layer refuses.
    assert_eq!(over_http_2("a b", "").problem().as_deref(), Some("key-invalid"));
}

async fn read(response: h2::client::ResponseFuture) -> Answer {
    let (head, mut body) = response.await.unwrap().into_parts();
    let mut bytes = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.unwrap();
        // Makes room for more.
        body.flow_control().release_capacity(chunk.len()).unwrap();
        bytes.extend(chunk);
    }
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
    Answer::new(head.status.as_u16(), headers.collect(), bytes)
}

pub(super) fn an_http_2_stream_that_is_reset_during_its_upload_leaves_nothing_behind(target: &Target) {
    let runtime = Runtime::new().unwrap();
    let stream = runtime.block_on(async {
        let (response, mut send) = begin_head(target, "k", "").await;
        send.send_data(Bytes::from_static(&crate::PAYMENT.as_bytes()[..10]), false).unwrap();
        (response, send)
    });
    target.await_stages("its head", |stages| stages.open == 1);
    drop(stream);
    target.await_quiet();
    // A record would make this a mismatch.
    let other = target.send(&target.pay("k").body(crate::PAYMENT.replace("1250", "1")));
    assert_eq!((other.status, other.is_replay(), target.effects()), (201, false, 1));
}

pub(super) fn an_http_2_stream_that_is_reset_before_or_after_the_effect_finds_its_payment_made_once(target: &Target) {
    let runtime = Runtime::new().unwrap();
    for (simulate, payments) in [("hold-before", 1), ("hold-after", 2)] {
        let stream = runtime.block_on(begin(target, simulate, simulate));
        if simulate == "hold-before" {
            target.await_run()
        } else {
            target.await_effect()
        }
        drop(stream);
        target.stays_held();
        target.release();
        let retry = target.send(&target.pay(simulate).waiting());
        assert_eq!((retry.status, retry.is_replay(), target.effects()), (201, true, payments), "{simulate}");
    }
}

pub(super) fn an_http_2_stream_that_is_reset_after_the_settlement_finds_its_answer(target: &Target) {
    let runtime = Runtime::new().unwrap();
    let stream = runtime.block_on(begin(target, "k", "hold-answer"));
    await_settlement(target, "k");
    drop(stream);
    let retry = target.send(&target.pay("k"));
    assert_eq!((retry.status, retry.is_replay(), target.effects()), (201, true, 1));
}

pub(super) fn an_http_2_stream_that_is_reset_during_its_answer_finds_that_it_was_made(target: &Target) {
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let (response, _send) = begin(target, "k", "stream=20000000").await;
        // Most of the body cannot be sent before the client makes room for it, which it never does.
        assert_eq!(response.await.unwrap().status().as_u16(), 201);
    });
    let retry = target.send(&target.pay("k"));
    assert_eq!((retry.status, retry.problem().as_deref()), (410, Some("body-not-retained")));
    assert_eq!(target.effects(), 1);
}
