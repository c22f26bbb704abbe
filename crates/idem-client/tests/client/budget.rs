//! A server that is down gets no more requests than the budget allows.

use std::time::{Duration, Instant};

use idem_client::{Error, ErrorKind, Operation, client};

use crate::server::{Act, Server, answer, quick};

/// The time of the outage. `IDEM_OUTAGE_S` makes it longer.
fn outage() -> Duration {
    std::env::var("IDEM_OUTAGE_S")
        .map_or(Duration::from_secs(2), |seconds| Duration::from_secs(seconds.parse().unwrap()))
}

/// Sixteen callers in parallel begin operations that would be retried every few milliseconds.
async fn requests_within_the_budget(act: Act) {
    const PER_SECOND: u32 = 6;
    const OPERATIONS: usize = 64;
    let server = Server::deciding(move |_, _| act.clone()).await;
    let client = client(quick().retry_budget(PER_SECOND, 0.2), reqwest::Client::builder()).unwrap().build();
    let (began, outage) = (Instant::now(), outage());
    let operation = Operation::new().deadline(outage);
    let callers: Vec<_> = (0..OPERATIONS)
        .map(|_| tokio::spawn(client.post(server.url("/pay")).with_extension(operation.clone()).send()))
        .collect();
    for caller in callers {
        let error = caller.await.unwrap().unwrap_err();
        assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::DeadlineExceeded);
    }
    // The retries of five seconds may come at once.
    let seconds = usize::try_from(began.elapsed().as_secs() + 1 + 5).unwrap();
    let most = OPERATIONS + seconds * PER_SECOND as usize + OPERATIONS / 5;
    let sent = server.arrived().len();
    println!("{sent} requests of {OPERATIONS} operations in {:.1?}; the budget allows {most}", began.elapsed());
    assert!(sent <= most, "{sent} requests, {most} are allowed");
    assert!(sent > OPERATIONS + PER_SECOND as usize * 4, "{sent}: the budget is used");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_answers_503_gets_no_more_than_the_budget() {
    requests_within_the_budget(answer("503 Service Unavailable")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_drops_connections_gets_no_more_than_the_budget() {
    requests_within_the_budget(Act::Close).await;
}
