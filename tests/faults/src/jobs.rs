//! The cell of asynchronous work: the reports example with two APIs and three workers, under kills, restarts of Postgres and bad
//! networks. Each job has one effect and one final answer, and the parked ones are exactly those that kill their workers.

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
use crate::process::{Process, start_the_dead};

/// How long a crashed worker keeps its jobs.
const LEASE: Duration = Duration::from_secs(1);

const APIS: usize = 2;
const WORKERS: usize = 3;
const CLIENTS: u64 = 24;

/// How long a client pauses between two jobs, in milliseconds: the faults shall hit all of them.
const LONGEST_PAUSE_MS: u64 = 1000;

/// One job in so many kills its worker.
const POISON_EVERY: u64 = 250;
const POISON: u64 = 1999;

/// How long a request, and all of them after the last fault, may take.
const PATIENCE: Duration = Duration::from_secs(10);
const CALM: Duration = Duration::from_secs(180);

/// What the clients share.
struct World {
    ports: Vec<u16>,
    next: AtomicU64,
    jobs: u64,
    over: AtomicBool,
    failures: Mutex<Vec<String>>,
    requests: AtomicU64,
    unanswered: AtomicU64,
    finals: AtomicU64,
}

/// An answer: status, location and body.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    status: u16,
    location: Option<String>,
    body: String,
}

fn year(job: u64) -> u64 {
    if job % POISON_EVERY == POISON_EVERY / 2 { POISON } else { 2000 + job % 25 }
}

impl World {
    fn fail(&self, failure: String) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
    }

    /// Asks once; `None` without an answer.
    async fn ask(&self, job: u64, random: &mut Random) -> Option<Answer> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let port = self.ports[random.below(self.ports.len() as u64) as usize];
        let body = format!(r#"{{"year":{}}}"#, year(job));
        let request = format!(
            "POST /reports HTTP/1.1\r\nHost: reports\r\nAuthorization: Bearer acme\r\nIdempotency-Key: \"job-{job}\"\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let answer = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.ok()?;
            read(&answer)
        };
        let answer = timeout(PATIENCE, answer).await.ok().flatten();
        if answer.is_none() {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }

    /// Asks until there is a final answer, and checks that it stays.
    async fn follow(&self, job: u64, random: &mut Random) {
        let mut first: Option<Answer> = None;
        let mut last: Option<Answer> = None;
        let mut repeats = 0;
        while repeats < 3 {
            if self.over.load(Ordering::Relaxed) {
                self.fail(format!("job {job} is stuck: first {first:?}, last {last:?}"));
                return;
            }
            let Some(answer) = self.ask(job, random).await else { continue };
            match answer.status {
                409 | 503 => sleep(Duration::from_millis(20 + random.below(50))).await,
                202 => {
                    if let Some(last) = &last {
                        return self.fail(format!("job {job} is accepted again after {last:?}"));
                    }
                    if *first.get_or_insert_with(|| answer.clone()) != answer {
                        return self.fail(format!("job {job} has two first answers: {first:?}, {answer:?}"));
                    }
                    sleep(Duration::from_millis(20 + random.below(100))).await;
                }
                _ => {
                    let is_poison = year(job) == POISON;
                    let expected = if is_poison { 500 } else { 201 };
                    let is_expected = answer.status == expected && answer.body.contains("job-parked") == is_poison;
                    if !is_expected || *last.get_or_insert_with(|| answer.clone()) != answer {
                        return self.fail(format!("job {job}: {answer:?} after {last:?}"));
                    }
                    repeats += 1;
                }
            }
        }
        self.finals.fetch_add(1, Ordering::Relaxed);
    }
}

/// An answer that arrived as a whole.
fn read(answer: &str) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let length: usize = field("content-length: ")?.parse().ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    (body.len() == length).then(|| Answer { status, location: field("location: "), body: body.to_owned() })
}

async fn start(name: String, role: &str, postgres: u16, folder: &Path) -> Result<Process, Error> {
    let lease = LEASE.as_millis().to_string();
    let args = ["--role", role, "--listen", "127.0.0.1:0", "--lease-ms", &lease, "--final-answers", "--store"];
    let args = args.map(str::to_owned).into();
    Process::start(name, "reports", args, postgres, folder).await
}

/// Runs `jobs` jobs, and returns whether every promise was kept.
pub(crate) async fn run(jobs: u64, seed: u64) -> Result<bool, Error> {
    let began = Instant::now();
    let mut postgres = tokio::task::block_in_place(Postgres::start)?;
    let folder = TempDir::new()?;
    let mut processes = Vec::new();
    for number in 0..APIS {
        processes.push(start(format!("api-{number}"), "api", postgres.port(), folder.path()).await?);
    }
    for number in 0..WORKERS {
        processes.push(start(format!("worker-{number}"), "worker", postgres.port(), folder.path()).await?);
    }
    let world = Arc::new(World {
        ports: processes[..APIS].iter().map(|process| process.to_service.port()).collect(),
        next: AtomicU64::new(0),
        jobs,
        over: AtomicBool::new(false),
        failures: Mutex::default(),
        requests: AtomicU64::new(0),
        unanswered: AtomicU64::new(0),
        finals: AtomicU64::new(0),
    });
    let mut random = Random::new(seed);
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (world, mut random) = (Arc::clone(&world), Random::new(random.number()));
        clients.spawn(async move {
            loop {
                let job = world.next.fetch_add(1, Ordering::Relaxed);
                if job >= world.jobs {
                    return;
                }
                sleep(Duration::from_millis(random.below(LONGEST_PAUSE_MS))).await;
                world.follow(job, &mut random).await;
            }
        });
    }
    let faults = cause(&world, &mut processes, &mut postgres, &mut random).await?;
    // No more faults, but workers that the last poison kills are started again.
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
    // A job whose end was not reported is delivered once more.
    let settled_by = Instant::now() + 20 * LEASE;
    let mut found = wrong(&postgres.url(), jobs).await?;
    while !found.is_empty() && Instant::now() < settled_by {
        start_the_dead(&mut processes)?;
        sleep(Duration::from_millis(200)).await;
        found = wrong(&postgres.url(), jobs).await?;
    }
    failures.extend(found);
    let count: u64 = faults.values().sum();
    let requests = world.requests.load(Ordering::Relaxed);
    let unanswered = world.unanswered.load(Ordering::Relaxed);
    println!(
        "jobs/transactional: {jobs} jobs, {} with a final answer, {requests} requests, {unanswered} without an answer, in {:.0} s",
        world.finals.load(Ordering::Relaxed),
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
    if !failures.is_empty() {
        std::fs::write(folder.path().join("postgres.log"), postgres.log()?)?;
        println!("  the logs are in {}", folder.keep().display());
    }
    Ok(failures.is_empty())
}

/// Causes faults until three quarters of the jobs have their final answers.
async fn cause(
    world: &World,
    processes: &mut [Process],
    postgres: &mut Postgres,
    random: &mut Random,
) -> Result<BTreeMap<&'static str, u64>, Error> {
    let mut faults = BTreeMap::new();
    while world.finals.load(Ordering::Relaxed) < world.jobs * 3 / 4
        && world.failures.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    {
        sleep(Duration::from_millis(100 + random.below(300))).await;
        let number = random.below(processes.len() as u64) as usize;
        let lasts = Duration::from_millis(100 + random.below(900));
        let kind = random.below(12);
        let process = &mut processes[number];
        let name = match kind {
            0..=3 => {
                process.kill()?;
                sleep(lasts / 2).await;
                tokio::task::block_in_place(|| process.launch())?;
                if number < APIS { "kills of an API" } else { "kills of a worker" }
            }
            4 => {
                tokio::task::block_in_place(|| postgres.restart())?;
                "restarts of Postgres"
            }
            5 => {
                postgres.kill()?;
                sleep(lasts / 2).await;
                tokio::task::block_in_place(|| postgres.start_again())?;
                "crashes of Postgres"
            }
            6 | 7 => {
                process.to_service.weather(Weather::DropAnswer);
                sleep(lasts).await;
                process.to_service.weather(Weather::Clear);
                "lost answers of a service"
            }
            8 => {
                process.to_service.weather(Weather::CutAfter(random.below(400) as usize));
                sleep(lasts).await;
                process.to_service.weather(Weather::Clear);
                "cut answers of a service"
            }
            9 => {
                process.to_postgres.weather(Weather::DropAnswer);
                sleep(lasts).await;
                process.to_postgres.weather(Weather::Clear);
                "lost answers of Postgres"
            }
            10 => {
                process.to_postgres.weather(Weather::BlackHole);
                sleep(lasts * 3).await;
                process.to_postgres.weather(Weather::Clear);
                "black holes before Postgres"
            }
            _ => {
                process.to_postgres.weather(Weather::Reset);
                sleep(lasts).await;
                process.to_postgres.weather(Weather::Clear);
                "resets before Postgres"
            }
        };
        *faults.entry(name).or_default() += 1;
        start_the_dead(processes)?;
    }
    Ok(faults)
}

/// What the database says against it.
async fn wrong(url: &str, jobs: u64) -> Result<Vec<String>, Error> {
    let mut connection = sqlx::PgConnection::connect(url).await?;
    let poison = (0..jobs).filter(|job| year(*job) == POISON).count() as i64;
    let jobs = jobs as i64;
    let expected = [
        ("jobs", "SELECT count(*) FROM reports.idem_jobs", jobs),
        (
            "jobs with two effects",
            "SELECT count(*) FROM (SELECT FROM reports.reports GROUP BY job HAVING count(*) > 1) AS twice",
            0,
        ),
        ("jobs with an effect", "SELECT count(DISTINCT job) FROM reports.reports", jobs - poison),
        ("parked jobs", "SELECT count(*) FROM reports.idem_jobs WHERE is_parked", poison),
        (
            "parked jobs that kill nobody",
            "SELECT count(*) FROM reports.idem_jobs WHERE is_parked AND convert_from(payload, 'UTF8') NOT LIKE '%1999%'",
            0,
        ),
        ("jobs that have not ended", "SELECT count(*) FROM reports.idem_jobs WHERE keep_until IS NULL", 0),
        ("records of requests and jobs", "SELECT count(*) FROM reports.idem_records WHERE state <> 1", 2 * jobs),
    ];
    let mut wrong = Vec::new();
    for (what, count, expected) in expected {
        let found: i64 = sqlx::query(count).fetch_one(&mut connection).await?.try_get(0)?;
        if found != expected {
            wrong.push(format!("{found} {what}, not {expected}"));
        }
    }
    Ok(wrong)
}
