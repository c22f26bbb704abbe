//! A client that repeats its request until it has an answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http_body_util::Full;
use hyper::{Request, StatusCode};
use tokio::time::{Instant, sleep, timeout};

use super::World;
use super::ledger::Failure;
use super::service::{Answer, Connection};
use crate::Error;
use crate::random::Random;

/// The percentage of requests that repeat another client's key.
const DUPLICATES: u64 = 30;

/// The client's timeout, longer than any answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a client retries one payment.
const STUBBORNNESS: Duration = Duration::from_secs(60);

pub(super) struct Client {
    world: Arc<World>,
    random: Random,
    /// Half of the duplicates choose among this many newest keys, most of which are running.
    newest: u64,
    recent: u64,
    /// Whether payments take so long that duplicates meet them.
    slow: bool,
    connections: [Option<Connection>; 2],
}

impl Client {
    pub(super) fn new(world: Arc<World>, random: Random, newest: u64, recent: u64, slow: bool) -> Self {
        Self { world, random, newest, recent, slow, connections: [None, None] }
    }

    pub(super) async fn work(mut self) -> Result<(), Error> {
        while !self.world.over.load(Ordering::Relaxed) {
            let key = self.key();
            self.pay(key).await?;
        }
        Ok(())
    }

    fn key(&mut self) -> u64 {
        let keys = self.world.ledger.keys();
        if keys == 0 || !self.random.chance(DUPLICATES) {
            return self.world.ledger.new_key();
        }
        let among = if self.random.chance(50) { self.newest } else { self.recent };
        keys - 1 - self.random.below(among.min(keys))
    }

    /// Retries until there is a definite answer.
    async fn pay(&mut self, key: u64) -> Result<(), Error> {
        let give_up_at = Instant::now() + STUBBORNNESS;
        while Instant::now() < give_up_at {
            let process = self.random.below(2) as usize;
            let delay = if self.slow { 20 + self.random.below(60) } else { self.random.below(20) };
            let began = self.world.started.elapsed();
            let answer = timeout(PATIENCE, self.send(process, key, delay)).await;
            let ended = self.world.started.elapsed();
            let what = match answer {
                Ok(Ok(answer)) => match read(&answer) {
                    Ok(known) => {
                        self.world.ledger.count(known, ended - began);
                        if answer.status == StatusCode::CREATED {
                            self.world.ledger.answered(key, &answer);
                            return Ok(());
                        }
                        None
                    }
                    Err(wrong) => Some(wrong),
                },
                Ok(Err(error)) => {
                    self.connections[process] = None;
                    Some(error.to_string())
                }
                Err(_) => {
                    self.connections[process] = None;
                    Some("no answer".to_owned())
                }
            };
            if let Some(what) = what {
                self.world.ledger.failed(Failure { what, began, ended });
            }
            sleep(Duration::from_millis(5 + self.random.below(40))).await;
        }
        Err(format!("key {key} got no definite answer within {STUBBORNNESS:?}").into())
    }

    async fn send(&mut self, process: usize, key: u64, delay: u64) -> Result<Answer, Error> {
        let place = &mut self.connections[process];
        let connection = match place {
            Some(connection) => connection,
            None => place.insert(self.world.services[process].connect().await?),
        };
        connection.send(payment(key, delay)?).await
    }
}

/// After all faults, asks each process for a key once more; the answer must be the same as before.
pub(super) async fn ask_again(world: &Arc<World>, key: u64) -> Result<(), Error> {
    for service in &world.services {
        let answer = service.connect().await?.send(payment(key, 0)?).await?;
        if answer.status != StatusCode::CREATED {
            return Err(format!("key {key} gets {} when all is well again", answer.status).into());
        }
        world.ledger.answered(key, &answer);
    }
    Ok(())
}

fn payment(key: u64, delay: u64) -> Result<Request<Full<bytes::Bytes>>, Error> {
    let body = format!(r#"{{"amount":{},"currency":"EUR","recipient":"{key}"}}"#, key + 1);
    let request = Request::post("/v1/payments")
        .header("host", "payments")
        .header("authorization", "Bearer acme")
        .header("content-type", "application/json")
        .header("idempotency-key", format!("key-{key}"))
        .header("x-simulate", format!("delay-before={delay}"));
    Ok(request.body(Full::from(body))?)
}

/// The kind of a correct answer, or what is wrong with it.
fn read(answer: &Answer) -> Result<&'static str, String> {
    let has = |name: &str| answer.headers.contains_key(name);
    match answer.status {
        StatusCode::CREATED if has("idempotency-replayed") => Ok("replays"),
        StatusCode::CREATED => Ok("firsts"),
        StatusCode::CONFLICT if has("retry-after") => Ok("conflicts"),
        status => Err(status.as_u16().to_string()),
    }
}
