//! Clients that repeat their payments until they have an answer.

use std::net::SocketAddr;
use std::ops::Sub;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use idem_http_suite::{Answer, Request};

use crate::Error;

/// The tenant that pays.
pub(super) const TENANT: &str = "faults";

/// How long a client retries one payment.
const STUBBORNNESS: Duration = Duration::from_secs(120);

/// The pause between two attempts, and between two payments.
const REST: Duration = Duration::from_millis(50);

/// The counters of all clients.
#[derive(Debug)]
pub(super) struct Watch {
    over: AtomicBool,
    answered: AtomicU64,
    refused: AtomicU64,
}

/// How many attempts were answered, and how many were not.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    pub(super) answered: u64,
    pub(super) refused: u64,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self { over: AtomicBool::new(false), answered: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        Counts { answered: self.answered.load(Ordering::Relaxed), refused: self.refused.load(Ordering::Relaxed) }
    }
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self { answered: self.answered - before.answered, refused: self.refused - before.refused }
    }
}

/// A payment that was made.
#[derive(Debug)]
pub(super) struct Payment {
    key: String,
    body: Vec<u8>,
    pub(super) began: Instant,
    pub(super) ended: Instant,
}

/// Makes payments with fresh keys, each time at the next example, until the watch is over.
pub(super) fn work(client: usize, examples: &[SocketAddr], watch: &Watch) -> Result<Vec<Payment>, Error> {
    let mut payments = Vec::new();
    while !watch.over.load(Ordering::Relaxed) {
        let (key, began) = (format!("client-{client}-{}", payments.len()), Instant::now());
        let body = pay(&key, payments.len(), examples, watch)?.body;
        payments.push(Payment { key, body, began, ended: Instant::now() });
        thread::sleep(REST);
    }
    Ok(payments)
}

/// Retries at each example in turn until there is a definite answer.
fn pay(key: &str, first: usize, examples: &[SocketAddr], watch: &Watch) -> Result<Answer, Error> {
    let began = Instant::now();
    for &example in examples.iter().cycle().skip(first % examples.len().max(1)) {
        match Request::pay(key).tenant(TENANT).try_send(example) {
            Some(answer) if answer.status == 201 => {
                watch.answered.fetch_add(1, Ordering::Relaxed);
                return Ok(answer);
            }
            // A run is in progress, or the store is unavailable.
            Some(answer) if answer.status != 409 && answer.status < 500 => {
                return Err(format!("{key}: {answer:?}").into());
            }
            Some(_) | None if began.elapsed() > STUBBORNNESS => {
                return Err(format!("{key}: no answer within {} s", STUBBORNNESS.as_secs()).into());
            }
            Some(_) | None => {
                watch.refused.fetch_add(1, Ordering::Relaxed);
                thread::sleep(REST);
            }
        }
    }
    Err("there is no example to ask".into())
}

/// Repeats every payment at every example and compares the answers. Returns the number of compared answers.
pub(super) fn replay_all(examples: &[SocketAddr], payments: &[Payment]) -> Result<usize, Error> {
    let mut compared = 0;
    for payment in payments {
        for example in examples {
            let answer = Request::pay(&payment.key).tenant(TENANT).send(*example);
            if (answer.status, &answer.body) != (201, &payment.body) {
                return Err(format!("{} was answered otherwise when it was repeated: {answer:?}", payment.key).into());
            }
            compared += 1;
        }
    }
    Ok(compared)
}
