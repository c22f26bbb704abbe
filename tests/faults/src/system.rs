//! `--end-to-end`: clients with journals, both frameworks over Postgres with Redis in front, workers, relays and a consumer, while
//! everything is killed. In the end, each operation that a journal knows has one effect and one final answer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use idem_faults::end_to_end::{
    CLIENTS, Deed, Fault, Found, Journaled, Kind, LEASE, PROCESSES, Target, check, plan, read_answer,
};
use idem_proxy::Weather;
use idem_servers::{Postgres, Redis};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Row as _};
use tempfile::TempDir;
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::Error;
use crate::brokers::Broker;
use crate::process::Process;

/// The topic of `tests/messages`.
const TOPIC: &str = "orders";

/// How many clients share a journal.
const SHARERS: usize = 2;

/// How long everything after the last fault may take.
const CALM: Duration = Duration::from_secs(300);

/// How long effects are awaited that must not come: longer than a repeated message takes.
const AFTERMATH: Duration = Duration::from_secs(5);

/// How long the signals and the starts of a fault may take before the run says so.
const SLOW: Duration = Duration::from_secs(15);

/// The least numbers of operations, replays and resumed operations that say anything.
const LEAST: [(&str, usize); 3] = [("operations", 100), ("replays", 10), ("resumed operations", 10)];

/// Runs the system under the faults of this seed, and returns whether every promise was kept.
pub(crate) async fn run(total: Duration, seed: u64, only_plan: bool) -> Result<bool, Error> {
    let planned = plan(seed, total);
    planned.iter().for_each(|fault| println!("{fault}"));
    println!("{} faults in {:.0} s, seed {seed}", planned.len(), total.as_secs_f64());
    if only_plan {
        return Ok(true);
    }
    let mut system = System::start().await?;
    let began = Instant::now();
    for fault in &planned {
        sleep(fault.at.saturating_sub(began.elapsed())).await;
        system.note_the_dead()?;
        let caused_at = began.elapsed();
        system.cause(fault).await?;
        let took = began.elapsed() - caused_at;
        if took > fault.lasts + SLOW {
            println!("  slow: {fault} took {:.1} s at {:.1} s", took.as_secs_f64(), caused_at.as_secs_f64());
        }
    }
    sleep(total.saturating_sub(began.elapsed())).await;
    system.note_the_dead()?;
    let faulty = began.elapsed();
    system.finish().await?;
    let (found, counts) = system.found().await?;
    let mut failures = std::mem::take(&mut system.failures);
    failures.extend(check(&found).iter().map(ToString::to_string));
    for ((what, least), count) in LEAST.into_iter().zip([found.journaled.len(), counts.replays, counts.resumed]) {
        if count < least {
            failures.push(format!("{count} {what} are too few to say anything"));
        }
    }
    failures.iter().take(20).for_each(|failure| println!("  FAILED: {failure}"));
    let by_kind: Vec<String> = hits(&planned).iter().map(|(what, times)| format!("{times} {what}")).collect();
    println!("faults in {:.0} s: {}", faulty.as_secs_f64(), by_kind.join(", "));
    println!(
        "end to end: {} operations, {} payments, {} effects of messages, {} replays, {} resumed, {} never journalled, \
         {} violations, seed {seed}",
        found.journaled.len(),
        found.ledger.len(),
        found.effects.len(),
        counts.replays,
        counts.resumed,
        counts.intents.saturating_sub(found.journaled.len()),
        failures.len(),
    );
    if !failures.is_empty() {
        std::fs::write(system.folder.join("postgres.log"), system.postgres.log()?)?;
        println!("  the logs and the journals are in {}", system.folder.display());
    } else {
        std::fs::remove_dir_all(&system.folder)?;
    }
    Ok(failures.is_empty())
}

/// How often each kind of fault hit each target.
fn hits(planned: &[Fault]) -> BTreeMap<String, u64> {
    let mut hits = BTreeMap::new();
    for Fault { kind, targets, .. } in planned {
        for target in targets {
            *hits.entry(format!("{kind} {target}")).or_default() += 1;
        }
    }
    hits
}

/// The servers and the processes.
struct System {
    // First, so that they are gone before the servers.
    processes: Vec<Process>,
    postgres: Postgres,
    redis: Redis,
    nats: Broker,
    /// The logs and the journals. They stay unless all went well.
    folder: PathBuf,
    /// What went wrong besides what the checker finds.
    failures: Vec<String>,
}

/// What is counted besides the rows.
#[derive(Default)]
struct Counts {
    /// Operations that a client was about to begin.
    intents: usize,
    /// Final answers in the journals that are marked as replays.
    replays: usize,
    /// Answers to operations that a client resumed.
    resumed: usize,
}

impl System {
    async fn start() -> Result<Self, Error> {
        let (postgres, redis) = block_in_place(|| Ok::<_, Error>((Postgres::start()?, Redis::start()?)))?;
        let nats = Broker::start("nats", TOPIC).await?;
        let folder = TempDir::new()?.keep();
        let mut system = Self { processes: Vec::new(), postgres, redis, nats, folder, failures: Vec::new() };
        for (place, name) in PROCESSES.iter().enumerate() {
            let (program, args) = system.command(place, name);
            let (port, folder) = (system.postgres.port(), system.folder.clone());
            system.processes.push(Process::start((*name).to_owned(), program, args, port, &folder).await?);
        }
        Ok(system)
    }

    /// The program of a process, and its arguments. The URL of Postgres follows them.
    fn command(&self, place: usize, name: &str) -> (&'static str, Vec<String>) {
        let lease = LEASE.as_millis().to_string();
        let role = name.split('-').next().unwrap_or_default();
        let (program, others) = match role {
            "relay" | "consumer" => ("messages", ["--broker".to_owned(), self.nats.url()].to_vec()),
            "client" => ("end-to-end", self.client_args(place, name)),
            _ => ("end-to-end", ["--redis".to_owned(), self.redis.url()].to_vec()),
        };
        let args = ["--role", role, "--lease-ms", &lease].map(str::to_owned).into_iter();
        (program, args.chain(others).chain(["--postgres".to_owned()]).collect())
    }

    fn client_args(&self, place: usize, name: &str) -> Vec<String> {
        let folder = &self.folder;
        let (journal, list) = (journal(folder, place - CLIENTS.start), list(folder, name));
        let mut args: Vec<String> =
            ["--tenant", name, "--journal", &journal.to_string_lossy()].map(str::to_owned).into();
        args.extend(["--list".to_owned(), list.to_string_lossy().into_owned()]);
        for service in &self.processes[..2] {
            args.extend(["--service".to_owned(), format!("http://127.0.0.1:{}", service.to_service.port())]);
        }
        args
    }

    async fn cause(&mut self, fault: &Fault) -> Result<(), Error> {
        let Fault { kind, targets, lasts, .. } = fault;
        match kind {
            Kind::Kill => {
                targets.iter().try_for_each(|target| block_in_place(|| self.kill(*target)))?;
                sleep(*lasts).await;
                targets.iter().try_for_each(|target| block_in_place(|| self.start_again(*target)))?;
            }
            Kind::Pause => {
                targets.iter().try_for_each(|target| block_in_place(|| self.pause(*target)))?;
                sleep(*lasts).await;
                targets.iter().try_for_each(|target| block_in_place(|| self.resume(*target)))?;
            }
            Kind::LoseAnswers => {
                self.answers_of(targets, Weather::DropAnswer);
                sleep(*lasts).await;
                self.answers_of(targets, Weather::Clear);
            }
        }
        Ok(())
    }

    fn answers_of(&self, services: &[Target], weather: Weather) {
        for target in services {
            if let Target::Process(place) = target {
                self.processes[*place].to_service.weather(weather);
            }
        }
    }

    fn kill(&mut self, target: Target) -> Result<(), Error> {
        match target {
            Target::Postgres => self.postgres.kill()?,
            Target::Redis => self.redis.kill()?,
            Target::Nats => self.nats.kill()?,
            Target::Process(place) => self.processes[place].kill()?,
        }
        Ok(())
    }

    fn start_again(&mut self, target: Target) -> Result<(), Error> {
        match target {
            Target::Postgres => self.postgres.start_again()?,
            Target::Redis => self.redis.start_again()?,
            Target::Nats => self.nats.start_again()?,
            Target::Process(place) => self.processes[place].launch()?,
        }
        Ok(())
    }

    fn pause(&mut self, target: Target) -> Result<(), Error> {
        match target {
            Target::Postgres => self.postgres.freeze()?,
            Target::Redis => self.redis.pause()?,
            Target::Nats => self.to_nats(Weather::BlackHole),
            Target::Process(place) => self.processes[place].pause()?,
        }
        Ok(())
    }

    fn resume(&mut self, target: Target) -> Result<(), Error> {
        match target {
            Target::Postgres => self.postgres.thaw()?,
            Target::Redis => self.redis.resume()?,
            Target::Nats => self.to_nats(Weather::Clear),
            Target::Process(place) => self.processes[place].resume()?,
        }
        Ok(())
    }

    fn to_nats(&self, weather: Weather) {
        if let Some(network) = &self.nats.network {
            network.weather(weather);
        }
    }

    /// No process may end by itself, whatever it has lost. It is started again.
    fn note_the_dead(&mut self) -> Result<(), Error> {
        for (process, name) in self.processes.iter_mut().zip(PROCESSES) {
            if process.has_died()? {
                self.failures.push(format!("{name} ended by itself"));
                block_in_place(|| process.launch())?;
            }
        }
        Ok(())
    }

    /// Lets one client for each journal resume what is left, and waits until the journals, the jobs and the messages are done.
    async fn finish(&mut self) -> Result<(), Error> {
        for client in CLIENTS {
            self.processes[client].kill()?;
        }
        let give_up_at = Instant::now() + CALM;
        let last: Vec<usize> = CLIENTS.step_by(SHARERS).collect();
        for client in &last {
            self.processes[*client].add("--finish");
            block_in_place(|| self.processes[*client].launch())?;
        }
        for client in last {
            while !self.processes[client].has_died()? && Instant::now() < give_up_at {
                sleep(Duration::from_millis(100)).await;
            }
            self.processes[client].kill()?;
        }
        let mut left = self.left().await?;
        while !left.is_empty() && Instant::now() < give_up_at {
            sleep(Duration::from_millis(200)).await;
            left = self.left().await?;
        }
        self.failures.extend(left);
        sleep(AFTERMATH).await;
        Ok(())
    }

    /// What is not done.
    async fn left(&self) -> Result<Vec<String>, Error> {
        let mut connection = sqlx::PgConnection::connect(&self.postgres.url()).await?;
        let mut left = Vec::new();
        for (what, count) in [
            ("jobs have not ended", "SELECT count(*) FROM messages.idem_jobs WHERE keep_until IS NULL"),
            ("messages were not sent", "SELECT count(*) FROM messages.idem_outbox"),
            (
                "messages had no effect",
                "SELECT count(*) FROM messages.payments WHERE id NOT IN (SELECT number FROM messages.effects)",
            ),
        ] {
            let count: i64 = sqlx::query(count).fetch_one(&mut connection).await?.try_get(0)?;
            if count > 0 {
                left.push(format!("{count} {what}"));
            }
        }
        Ok(left)
    }

    /// Reads what the run has left.
    async fn found(&self) -> Result<(Found, Counts), Error> {
        let (mut found, mut counts) = (Found::default(), Counts::default());
        let mut connection = sqlx::PgConnection::connect(&self.postgres.url()).await?;
        let ledger =
            sqlx::query("SELECT operation, amount, id FROM messages.payments").fetch_all(&mut connection).await?;
        for row in ledger {
            found.ledger.push(Deed { operation: row.try_get(0)?, amount: row.try_get(1)?, payment: row.try_get(2)? });
        }
        let effects = sqlx::query("SELECT id, number FROM messages.effects").fetch_all(&mut connection).await?;
        for row in effects {
            found.effects.push((row.try_get(0)?, row.try_get(1)?));
        }
        for client in (0..CLIENTS.len()).step_by(SHARERS) {
            read_journal(&journal(&self.folder, client), &mut found, &mut counts).await?;
        }
        for name in &PROCESSES[CLIENTS] {
            let lines = std::fs::read_to_string(list(&self.folder, name))?;
            lines.lines().for_each(|line| read_line(line, &mut found, &mut counts));
        }
        Ok((found, counts))
    }
}

/// The journal of a client.
fn journal(folder: &Path, client: usize) -> PathBuf {
    folder.join(format!("journal-{}", client / SHARERS))
}

/// The list of a client.
fn list(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.list"))
}

/// Reads the file itself, so that no bug of the journal hides what it does.
async fn read_journal(path: &Path, found: &mut Found, counts: &mut Counts) -> Result<(), Error> {
    let mut connection = SqliteConnectOptions::new().filename(path).connect().await?;
    let rows = "SELECT body, status, answer_body, answer_headers FROM operations";
    for row in sqlx::query(rows).fetch_all(&mut connection).await? {
        let asked: serde_json::Value = serde_json::from_slice(row.try_get(0)?)?;
        let operation = asked["operation"].as_str().ok_or("an operation of the journal has no name")?.to_owned();
        let amount = asked["amount"].as_i64().ok_or("an operation of the journal has no amount")?;
        let status: Option<u16> = row.try_get(1)?;
        let answer = match status {
            Some(status) => Some(read_answer(status, row.try_get(2)?)),
            None => None,
        };
        if answer.is_some() {
            let fields: Vec<(String, Vec<u8>)> = serde_json::from_slice(row.try_get(3)?)?;
            counts.replays += usize::from(fields.iter().any(|(name, _)| name == "idempotency-replayed"));
        }
        found.journaled.push(Journaled { operation, amount, answer });
    }
    Ok(())
}

/// Reads a line of a client's list. The last one of a process that was killed may have no end, and then says nothing.
fn read_line(line: &str, found: &mut Found, counts: &mut Counts) {
    let mut words = line.splitn(3, ' ');
    let (how, status, body) = (words.next(), words.next(), words.next());
    match (how, status.map(str::parse), body) {
        (Some("intent"), Some(_), None) => counts.intents += 1,
        (Some(how @ ("answered" | "resumed")), Some(Ok(status)), Some(body)) if is_whole(body) => {
            counts.resumed += usize::from(how == "resumed");
            found.seen.push(read_answer(status, body.as_bytes()));
        }
        _ => {}
    }
}

fn is_whole(body: &str) -> bool {
    serde_json::from_str::<serde_json::Value>(body).is_ok()
}
