//! The cells of messages: requests whose messages go through an outbox, a relay, a broker and an inbox, while everything is killed.
//! Each accepted order takes effect once, none that was rolled back does, accounts keep their order, and poison is parked and replayed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use idem_faults::Random;
use idem_proxy::Weather;
use idem_servers::Postgres;
use sqlx::{Connection, Row};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::Error;
use crate::brokers::Broker;
use crate::process::{Process, start_the_dead};

/// The names of the cells.
pub(crate) const CELLS: [&str; 4] = ["messages/nats", "messages/rabbitmq", "messages/redis", "messages/kafka-mock"];

/// The topic of the service.
const TOPIC: &str = "orders";

const LEASE: Duration = Duration::from_secs(1);
const CLIENTS: u64 = 32;
const ACCOUNTS: u64 = 40;

/// How long a client pauses between two orders, in milliseconds: the faults shall hit all of them.
const LONGEST_PAUSE_MS: u64 = 250;

/// One order in so many kills each consumer that handles it, and one in so many is rolled back.
const POISON_EVERY: u64 = 2500;
const FAILS_EVERY: u64 = 20;

/// So many faults come while all orders are placed, at least. A broker that takes long to start again would otherwise leave room for few.
const LEAST_FAULTS: u64 = 60;

/// How long a request, and everything after the last fault, may take.
const PATIENCE: Duration = Duration::from_secs(10);
const CALM: Duration = Duration::from_secs(300);

/// How long the faults may take.
const LONGEST: Duration = Duration::from_secs(20 * 60);

const API: usize = 0;
const RELAYS: [usize; 2] = [1, 2];
const CONSUMER: usize = 3;

/// What the clients share.
struct World {
    port: u16,
    next: AtomicU64,
    orders: u64,
    over: AtomicBool,
    failures: Mutex<Vec<String>>,
    requests: AtomicU64,
    unanswered: AtomicU64,
    done: AtomicU64,
    faults: AtomicU64,
    /// There are no more faults.
    is_calm: AtomicBool,
}

fn is_poison(order: u64) -> bool {
    order % POISON_EVERY == POISON_EVERY / 2
}

fn fails(order: u64) -> bool {
    order % FAILS_EVERY == 7
}

impl World {
    fn fail(&self, failure: String) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
    }

    fn has_failed(&self) -> bool {
        !self.failures.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Asks once; `None` without an answer.
    async fn ask(&self, order: u64) -> Option<u16> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let account = order * 7919 % ACCOUNTS;
        let body = format!(
            r#"{{"id":"o-{order}","account":"a-{account}","is_poison":{},"fails":{}}}"#,
            is_poison(order),
            fails(order)
        );
        let request = format!(
            "POST /orders HTTP/1.1\r\nHost: orders\r\nIdempotency-Key: \"order-{order}\"\r\n\
             Traceparent: 00-{:032x}-00f067aa0ba902b7-01\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            order + 1,
            body.len()
        );
        let answer = async {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.ok()?;
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.ok()?;
            answer.split(' ').nth(1)?.parse().ok()
        };
        let status = timeout(PATIENCE, answer).await.ok().flatten();
        if status.is_none() {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
        }
        status
    }

    /// Waits until so many faults have come that the order may be placed.
    async fn admit(&self, order: u64) {
        let is_early = || order * LEAST_FAULTS > (self.faults.load(Ordering::Relaxed) + 1) * self.orders;
        while is_early() && !self.is_calm.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks until the order is accepted. One that is rolled back is given up after its first failure.
    async fn place(&self, order: u64, random: &mut Random) {
        loop {
            if self.over.load(Ordering::Relaxed) {
                return self.fail(format!("order {order} is stuck"));
            }
            match self.ask(order).await {
                Some(201) if fails(order) => return self.fail(format!("order {order} was accepted")),
                Some(201) => break,
                Some(500) if fails(order) => break,
                None | Some(409 | 500 | 503) => sleep(Duration::from_millis(20 + random.below(50))).await,
                Some(status) => return self.fail(format!("order {order} got {status}")),
            }
        }
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Places `orders` orders, and returns whether every promise was kept.
pub(crate) async fn run(cell: &str, orders: u64, seed: u64) -> Result<bool, Error> {
    let began = Instant::now();
    let mut postgres = tokio::task::block_in_place(Postgres::start)?;
    let mut broker = Broker::start(cell.trim_start_matches("messages/"), TOPIC).await?;
    let folder = TempDir::new()?;
    let mut processes = Vec::new();
    for (name, role) in [("api", "api"), ("relay-0", "relay"), ("relay-1", "relay"), ("consumer", "consumer")] {
        processes.push(start(name, role, &broker.url(), postgres.port(), folder.path()).await?);
    }
    let world = Arc::new(World {
        port: processes[API].to_service.port(),
        next: AtomicU64::new(0),
        orders,
        over: AtomicBool::new(false),
        failures: Mutex::default(),
        requests: AtomicU64::new(0),
        unanswered: AtomicU64::new(0),
        done: AtomicU64::new(0),
        faults: AtomicU64::new(0),
        is_calm: AtomicBool::new(false),
    });
    let mut random = Random::new(seed);
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (world, mut random) = (Arc::clone(&world), Random::new(random.number()));
        clients.spawn(async move {
            loop {
                let order = world.next.fetch_add(1, Ordering::Relaxed);
                if order >= world.orders {
                    return;
                }
                sleep(Duration::from_millis(random.below(LONGEST_PAUSE_MS))).await;
                world.admit(order).await;
                world.place(order, &mut random).await;
            }
        });
    }
    let faults = cause(&world, &mut processes, &mut postgres, &mut broker, &mut random).await?;
    world.is_calm.store(true, Ordering::Relaxed);
    // No more faults, but consumers that poison kills are started again.
    let give_up_at = Instant::now() + CALM;
    while !clients.is_empty() {
        tokio::select! {
            ended = clients.join_next() => { ended.transpose()?; }
            () = sleep(Duration::from_millis(100)) => start_the_dead(&mut processes)?,
        }
        if Instant::now() > give_up_at {
            world.over.store(true, Ordering::Relaxed);
        }
    }
    let mut failures = std::mem::take(&mut *world.failures.lock().unwrap_or_else(PoisonError::into_inner));
    if failures.is_empty() {
        failures = settle(&postgres.url(), orders, &mut processes).await?;
    }
    if failures.is_empty() {
        failures = replay(&postgres.url(), orders, &mut processes).await?;
    }
    report(cell, &world, &faults, &mut failures, began);
    if !failures.is_empty() {
        std::fs::write(folder.path().join("postgres.log"), postgres.log()?)?;
        println!("  the logs are in {}", folder.keep().display());
    }
    Ok(failures.is_empty())
}

async fn start(name: &str, role: &str, broker: &str, postgres: u16, folder: &Path) -> Result<Process, Error> {
    let lease = LEASE.as_millis().to_string();
    let args = ["--role", role, "--broker", broker, "--lease-ms", &lease, "--postgres"];
    let args = args.map(str::to_owned).into();
    Process::start(name.to_owned(), "messages", args, postgres, folder).await
}

fn report(cell: &str, world: &World, faults: &BTreeMap<&'static str, u64>, failures: &mut Vec<String>, began: Instant) {
    let count: u64 = faults.values().sum();
    let requests = world.requests.load(Ordering::Relaxed);
    let unanswered = world.unanswered.load(Ordering::Relaxed);
    println!(
        "{cell}: {} orders, {requests} requests, {unanswered} without an answer, in {:.0} s",
        world.orders,
        began.elapsed().as_secs_f64()
    );
    let by_kind: Vec<String> = faults.iter().map(|(kind, times)| format!("{times} {kind}")).collect();
    println!("{count} faults: {}", by_kind.join(", "));
    if unanswered < 10 || count < 20 {
        failures.push(format!("{count} faults and {unanswered} lost answers are too few to say anything"));
    }
    for failure in failures.iter().take(20) {
        println!("  FAILED: {failure}");
    }
    println!("{} violations", failures.len());
}

/// Causes faults until three quarters of the orders are done.
async fn cause(
    world: &World,
    processes: &mut [Process],
    postgres: &mut Postgres,
    broker: &mut Broker,
    random: &mut Random,
) -> Result<BTreeMap<&'static str, u64>, Error> {
    let mut faults = BTreeMap::new();
    let give_up_at = Instant::now() + LONGEST;
    while world.done.load(Ordering::Relaxed) < world.orders * 3 / 4 && !world.has_failed() {
        if Instant::now() > give_up_at {
            world.fail(format!("three quarters of the orders are not done after {LONGEST:?}"));
        }
        sleep(Duration::from_millis(100 + random.below(400))).await;
        let lasts = Duration::from_millis(100 + random.below(900));
        let number = random.below(processes.len() as u64) as usize;
        let process = &mut processes[number];
        let name = match random.below(16) {
            0..=4 => {
                process.kill()?;
                sleep(lasts / 2).await;
                tokio::task::block_in_place(|| process.launch())?;
                match number {
                    API => "kills of the API",
                    CONSUMER => "kills of the consumer",
                    _ if RELAYS.contains(&number) => "kills of a relay",
                    _ => "kills",
                }
            }
            5 | 6 => {
                tokio::task::block_in_place(|| broker.crash(lasts / 2))?;
                "crashes of the broker"
            }
            7 => {
                postgres.kill()?;
                sleep(lasts / 2).await;
                tokio::task::block_in_place(|| postgres.start_again())?;
                "crashes of Postgres"
            }
            8 | 9 => {
                process.to_postgres.weather(Weather::DropAnswer);
                sleep(lasts).await;
                process.to_postgres.weather(Weather::Clear);
                "lost answers of Postgres"
            }
            10 => {
                processes[API].to_service.weather(Weather::DropAnswer);
                sleep(lasts).await;
                processes[API].to_service.weather(Weather::Clear);
                "lost answers of the API"
            }
            11 => {
                process.to_postgres.weather(Weather::Reset);
                sleep(lasts).await;
                process.to_postgres.weather(Weather::Clear);
                "resets before Postgres"
            }
            12 => {
                process.pause()?;
                sleep(2 * LEASE + lasts).await;
                process.resume()?;
                "stops of a process for longer than a lease"
            }
            between => {
                let (weather, name) = match between {
                    13 => (Weather::BlackHole, "black holes before the broker"),
                    14 => (Weather::DropAnswer, "lost answers of the broker"),
                    _ => (Weather::Reset, "resets before the broker"),
                };
                let Some(network) = &broker.network else { continue };
                network.weather(weather);
                sleep(2 * lasts).await;
                network.weather(Weather::Clear);
                name
            }
        };
        *faults.entry(name).or_default() += 1;
        world.faults.fetch_add(1, Ordering::Relaxed);
        start_the_dead(processes)?;
    }
    Ok(faults)
}

/// Waits until every message has taken effect or is parked, and says what is wrong.
async fn settle(url: &str, orders: u64, processes: &mut [Process]) -> Result<Vec<String>, Error> {
    let poison = (0..orders).filter(|order| is_poison(*order)).count() as i64;
    if poison == 0 {
        return Ok(vec![format!("{orders} orders have no poison among them; take more")]);
    }
    let accepted = (0..orders).filter(|order| !fails(*order)).count() as i64;
    let expected = [
        ("orders", "SELECT count(*) FROM messages.orders", accepted),
        ("messages that were not sent", "SELECT count(*) FROM messages.idem_outbox", 0),
        ("effects", "SELECT count(*) FROM messages.effects", accepted - poison),
        ("parked messages", "SELECT count(*) FROM messages.idem_inbox WHERE state = 'parked'", poison),
        (
            "parked messages that kill nothing",
            "SELECT count(*) FROM messages.idem_inbox
             WHERE state = 'parked' AND convert_from(payload, 'UTF8') NOT LIKE '%\"is_poison\":true%'",
            0,
        ),
    ];
    let wrong = eventually(url, &expected, processes).await?;
    if !wrong.is_empty() {
        return Ok(wrong);
    }
    count(url, &always()).await
}

/// What must hold in the end, and is not waited for.
fn always() -> [(&'static str, &'static str, i64); 4] {
    [
        (
            "orders with two effects",
            "SELECT count(*) FROM (SELECT FROM messages.effects GROUP BY id HAVING count(*) > 1) AS twice",
            0,
        ),
        (
            "effects without an order",
            "SELECT count(*) FROM messages.effects WHERE id NOT IN (SELECT id FROM messages.orders)",
            0,
        ),
        (
            "effects without the trace of their order",
            "SELECT count(*) FROM messages.effects
             WHERE trace IS DISTINCT FROM lpad(to_hex(substr(id, 3)::BIGINT + 1), 32, '0')",
            0,
        ),
        (
            "effects that came too early for their account",
            "SELECT count(*) FROM (
                 SELECT number, lag(number) OVER (PARTITION BY account ORDER BY place) AS before FROM messages.effects
                 WHERE NOT EXISTS (SELECT FROM messages.idem_inbox AS parked WHERE parked.state = 'parked'
                     AND split_part(encode(parked.payload, 'escape'), '\"', 4) = effects.id)
             ) AS effects WHERE number < before",
            0,
        ),
    ]
}

/// Asks for a replay of each parked message, by consumers that it kills no more.
async fn replay(url: &str, orders: u64, processes: &mut [Process]) -> Result<Vec<String>, Error> {
    processes[CONSUMER].kill()?;
    processes[CONSUMER].add("--harmless");
    tokio::task::block_in_place(|| processes[CONSUMER].launch())?;
    let mut connection = sqlx::PgConnection::connect(url).await?;
    let request = "UPDATE messages.idem_inbox SET state = 'requested', replays = replays + 1 WHERE state = 'parked'";
    sqlx::raw_sql(request).execute(&mut connection).await?;
    let accepted = (0..orders).filter(|order| !fails(*order)).count() as i64;
    let expected = [
        ("effects", "SELECT count(*) FROM messages.effects", accepted),
        (
            "messages that wait for their replay",
            "SELECT count(*) FROM messages.idem_inbox WHERE state IN ('parked', 'requested')",
            0,
        ),
    ];
    let mut wrong = eventually(url, &expected, processes).await?;
    wrong.extend(count(url, &always()[..3]).await?);
    Ok(wrong)
}

async fn eventually(
    url: &str,
    expected: &[(&str, &'static str, i64)],
    processes: &mut [Process],
) -> Result<Vec<String>, Error> {
    let give_up_at = Instant::now() + CALM;
    loop {
        let wrong = count(url, expected).await?;
        if wrong.is_empty() || Instant::now() > give_up_at {
            return Ok(wrong);
        }
        start_the_dead(processes)?;
        sleep(Duration::from_millis(200)).await;
    }
}

async fn count(url: &str, expected: &[(&str, &'static str, i64)]) -> Result<Vec<String>, Error> {
    let mut connection = sqlx::PgConnection::connect(url).await?;
    let mut wrong = Vec::new();
    for (what, count, expected) in expected {
        let found: i64 = sqlx::query(*count).fetch_one(&mut connection).await?.try_get(0)?;
        if found != *expected {
            wrong.push(format!("{found} {what}, not {expected}"));
        }
    }
    Ok(wrong)
}
