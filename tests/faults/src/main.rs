//! `cargo xtask faults`: runs the payments example under hundreds of faults and prints the checker's verdict.

mod brokers;
mod client;
mod injector;
mod jobs;
mod messages;
mod process;
mod service;
mod system;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use clap::Parser;
use idem_faults::{Bad, Cell, Contract, Key, Kind, Planned, Random, Seen, Share, Violation, What};
use idem_faults::{check, plan, seen};
use tokio::task::JoinSet;
use tokio::time::sleep;

use client::{Client, LONGEST};
use injector::Caused;
use service::Service;
use world::{LEASE, SERVICES, Servers, World, promise};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Checks that stores and contracts keep their promises under faults.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask faults")]
struct Options {
    /// Total duration in minutes, shared by all cells. Default: 30, or 15 from end to end.
    #[arg(long)]
    minutes: Option<f64>,
    /// Seed of all faults and clients. The same seed gives the same schedule of faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs clients with journals, services, workers, relays and a consumer together, and no cells.
    #[arg(long, conflicts_with_all = ["cell", "jobs", "messages", "clients"])]
    end_to_end: bool,
    /// Runs only this cell, such as postgres/transactional; may be repeated.
    #[arg(long)]
    cell: Vec<String>,
    /// Number of jobs of the cell `jobs/transactional`, which takes as long as it takes.
    #[arg(long, default_value_t = 2000)]
    jobs: u64,
    /// Number of orders of each cell of messages, which takes as long as it takes.
    #[arg(long, default_value_t = 20_000)]
    messages: u64,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 48)]
    clients: u64,
    /// Prints the schedule and exits.
    #[arg(long)]
    plan: bool,
    /// The example built as its next version; `cargo xtask faults` passes its path.
    #[arg(long, hide = true, required_unless_present = "end_to_end")]
    next: Option<PathBuf>,
}

/// The cell of asynchronous work.
const JOBS: &str = "jobs/transactional";

/// How often many clients request one key at once, and how many.
const STORM_EVERY: Duration = Duration::from_secs(5);
const STORM: u64 = 50;

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Options::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<bool, Error> {
    let minutes = |usual| Duration::from_secs_f64(options.minutes.unwrap_or(usual) * 60.0);
    if options.end_to_end {
        return system::run(minutes(15.0), options.seed, options.plan).await;
    }
    let is_chosen = |cell: &Cell| options.cell.is_empty() || options.cell.contains(&cell.name());
    let is_named = |cell: &Cell| options.cell.contains(&cell.name());
    let named = Cell::NAMED.into_iter().filter(is_named);
    let cells: Vec<Cell> = Cell::ALL.into_iter().filter(is_chosen).chain(named).collect();
    let has_jobs = options.cell.is_empty() || options.cell.iter().any(|cell| cell == JOBS);
    // Minutes for each: they run if they are named.
    let messages: Vec<&str> =
        messages::CELLS.into_iter().filter(|name| options.cell.iter().any(|cell| cell == name)).collect();
    if cells.is_empty() && !has_jobs && messages.is_empty() {
        let names: Vec<String> = Cell::ALL.into_iter().chain(Cell::NAMED).map(Cell::name).collect();
        let messages = messages::CELLS.join(", ");
        return Err(format!("there is no such cell; there are {}, {JOBS}, {messages}", names.join(", ")).into());
    }
    let mut passed = true;
    let mut all = Vec::new();
    let total = minutes(30.0);
    let kinds: BTreeSet<Kind> =
        cells.iter().flat_map(|cell| cell.kinds().into_iter().chain(cell.long_stalls())).collect();
    for Share { cell, lasts, mut planned } in plan(&cells, options.seed, total, LEASE, SERVICES) {
        // A container shares the clock and the disk of the machine.
        if std::env::var_os("IDEM_POSTGRES_IMAGE").is_some() {
            planned.retain(|planned| !matches!(planned.fault.kind, Kind::FillPostgres | Kind::ShiftPostgres));
        }
        println!("{}: {} faults in {:.0} s, seed {}", cell.name(), planned.len(), lasts.as_secs_f64(), options.seed);
        if options.plan {
            print_plan(&planned);
            continue;
        }
        let found = try_cell(options, cell, &planned, lasts).await?;
        passed &= found.failures.is_empty();
        all.push(found);
    }
    if !options.plan && !all.is_empty() {
        print_table(&all, &kinds);
    }
    if !options.plan && has_jobs {
        passed &= jobs::run(options.jobs, options.seed).await?;
    }
    if !options.plan {
        for cell in messages {
            passed &= messages::run(cell, options.messages, options.seed).await?;
        }
    }
    Ok(passed)
}

fn print_plan(planned: &[Planned]) {
    for Planned { at, fault } in planned {
        let (at, lasts) = (at.as_secs_f64(), fault.lasts.as_secs_f64());
        let (weather, ahead, way) = (fault.weather, fault.ahead, fault.way % 6);
        println!(
            "{at:8.2} s  {} (service {}, {lasts:.2} s, {weather:?}, {ahead:+} s, way {way})",
            fault.kind, fault.service
        );
    }
}

/// The results of one cell.
struct Found {
    cell: Cell,
    faults: BTreeMap<Kind, u64>,
    keys: u64,
    seen: Seen,
    failures: Vec<String>,
}

async fn try_cell(options: &Options, cell: Cell, planned: &[Planned], lasts: Duration) -> Result<Found, Error> {
    let next = options.next.as_deref().ok_or("--next is missing; run this by `cargo xtask faults`")?;
    let mut servers = Servers::start(cell).await?;
    let mut services = Vec::new();
    for number in 0..SERVICES {
        services.push(Service::start(cell, number, servers.ports(), servers.folder.path(), next).await?);
    }
    servers.open_accounts(cell).await?;
    let world = Arc::new(World::new(&services));
    let mut random = Random::new(options.seed);
    let mut clients = JoinSet::new();
    for _ in 0..options.clients {
        clients.spawn(Client::new(Arc::clone(&world), Random::new(random.number())).work());
    }
    clients.spawn(storms(Arc::clone(&world), Random::new(random.number())));
    let mut caused = match injector::follow(planned, &world, &mut servers, &mut services).await {
        Ok(caused) => caused,
        Err(error) => return Err(format!("{error}; the logs are in {}", keep_logs(servers)?.display()).into()),
    };
    sleep(lasts.saturating_sub(world.started.elapsed())).await;
    let well_from = world.started.elapsed();
    world.over.store(true, Ordering::Relaxed);
    ask_for_all(&world, &mut random, options.clients).await?;
    while let Some(ended) = clients.join_next().await {
        ended?;
    }
    let effects = servers.effects(cell).await?;
    let history = std::mem::take(&mut *world.history.lock().unwrap_or_else(PoisonError::into_inner));
    let mut failures: Vec<String> = servers.leaks().await?;
    failures.extend(client::still_running(&world).await?);
    failures.extend(servers.unbalanced(cell).await?);
    for service in &services {
        caused.known.begun.extend(client::begun(&service.log()?));
    }
    let violations = check(&history, &effects, &caused.known, promise(cell), well_from);
    let mut rules = BTreeMap::<What, (u64, &Violation)>::new();
    for violation in &violations {
        rules.entry(violation.what.clone()).or_insert((0, violation)).0 += 1;
    }
    for (times, first) in rules.into_values() {
        failures.push(format!("{times} times as for {first}"));
        let name = format!("tenant-{}-key-{}.txt", first.key.tenant, first.key.key);
        let of_key = history.iter().filter(|operation| operation.key == first.key);
        let made = effects.iter().filter(|effect| effect.key == first.key);
        let lines =
            of_key.map(|operation| format!("{operation:?}\n")).chain(made.map(|effect| format!("{effect:?}\n")));
        let known = &caused.known;
        let began = if known.begun.contains(&first.key) { "its handler began" } else { "its handler never began" };
        let (losses, stalls) = (&known.losses, &known.stalls);
        let head = format!("well from {well_from:?}; {began}\nlosses {losses:?}\nstalls {stalls:?}\n");
        let lines = std::iter::once(head).chain(lines);
        std::fs::write(servers.folder.path().join(name), lines.collect::<String>())?;
    }
    let seen = seen(&history, &effects, &caused.known);
    failures.extend(vacuous(cell, planned, &caused, &seen));
    for failure in &failures {
        println!("  FAILED: {failure}");
    }
    if !failures.is_empty() {
        println!("  the logs, and what happened to these keys, are in {}", keep_logs(servers)?.display());
    }
    Ok(Found { cell, faults: caused.faults, keys: world.keys.load(Ordering::Relaxed), seen, failures })
}

fn keep_logs(servers: Servers) -> Result<PathBuf, Error> {
    if let Some(postgres) = &servers.postgres {
        std::fs::write(servers.folder.path().join("postgres.log"), postgres.log()?)?;
    }
    Ok(servers.folder.keep())
}

/// Storms: one key after the other, each requested by many clients at once.
async fn storms(world: Arc<World>, mut random: Random) {
    while !world.over.load(Ordering::Relaxed) {
        let key = Key { tenant: 0, key: world.keys.fetch_add(1, Ordering::Relaxed) };
        let mut storm = JoinSet::new();
        for _ in 0..STORM {
            let client = Client::new(Arc::clone(&world), Random::new(random.number()));
            storm.spawn(client.storm(key.clone()));
        }
        storm.join_all().await;
        sleep(STORM_EVERY).await;
    }
}

/// Asks for every key after the last fault, until its outcome is known. Keys without an answer come first, so that they do not
/// wait for the others.
async fn ask_for_all(world: &Arc<World>, random: &mut Random, clients: u64) -> Result<(), Error> {
    let (unanswered, answered) = {
        let history = world.history.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_answered = BTreeMap::<Key, bool>::new();
        for operation in history.iter() {
            *is_answered.entry(operation.key.clone()).or_default() |= operation.is_answered();
        }
        let (answered, unanswered): (Vec<_>, Vec<_>) =
            is_answered.into_iter().partition(|(_, is_answered)| *is_answered);
        let keys = |of: Vec<(Key, bool)>| of.into_iter().map(|(key, _)| key).collect::<Vec<_>>();
        (keys(unanswered), keys(answered))
    };
    for keys in [unanswered, answered] {
        ask_for(world, random, clients, &keys).await?;
    }
    Ok(())
}

async fn ask_for(world: &Arc<World>, random: &mut Random, clients: u64, keys: &[Key]) -> Result<(), Error> {
    let shares: Vec<Vec<Key>> = (0..clients)
        .map(|client| keys.iter().skip(client as usize).step_by(clients as usize).cloned().collect())
        .collect();
    let mut asking = JoinSet::new();
    for share in shares {
        let mut client = Client::new(Arc::clone(world), Random::new(random.number()));
        let world = Arc::clone(world);
        asking.spawn(async move {
            for key in share {
                // The client does not know which body claimed the key, so it tries both.
                let amount = world.amount_of(&key);
                for amount in [amount, amount + 1] {
                    let answer = client.insist(&key, amount, LONGEST).await;
                    if answer.is_some_and(|answer| answer.problem.as_deref() != Some("mismatch")) {
                        break;
                    }
                }
            }
        });
    }
    while let Some(ended) = asking.join_next().await {
        ended?;
    }
    Ok(())
}

/// Lists why a run has tested too little.
fn vacuous(cell: Cell, planned: &[Planned], caused: &Caused, seen: &Seen) -> Vec<String> {
    let mut failures = Vec::new();
    let declared: BTreeSet<Kind> = planned.iter().map(|planned| planned.fault.kind).collect();
    for kind in declared {
        if !caused.faults.contains_key(&kind) {
            failures.push(format!("{kind} was never caused"));
        }
        let is_harmless = |bad| bad == Bad::Delay;
        let does_harm = match kind {
            Kind::ToPostgres(bad) | Kind::ToRedis(bad) | Kind::ToMariaDb(bad) | Kind::ToService(bad) => {
                !is_harmless(bad)
            }
            // Verbs in one statement hold their locks too briefly for the squatter to see all of them.
            Kind::SquatLocks => cell.contract == Contract::Transactional,
            Kind::RotatePostgres | Kind::RevokePostgres | Kind::RotateRedis | Kind::RevokeRedis => true,
            Kind::FillPooler | Kind::EndMariaDbSessions => true,
            _ => false,
        };
        if does_harm && caused.harmed.get(&kind).copied().unwrap_or_default() == 0 {
            failures.push(format!("{kind} harmed nothing"));
        }
    }
    let mut expect = |what: &str, count: u64, least: u64| {
        if count < least {
            failures.push(format!("{count} {what} are too few to say anything"));
        }
    };
    let faults = planned.len() as u64;
    let losing = planned.iter().filter(|planned| planned.fault.kind.loses_answers()).count() as u64;
    expect("successes", seen.successes, 100);
    expect("replays", seen.replays, 100);
    expect("mismatches", seen.mismatches, 10);
    expect("answers while another run was in progress", seen.in_progress, 10);
    expect("requests without an answer", seen.unknown, losing);
    if !caused.known.stalls.is_empty() {
        expect("keys that were asked for first in a stall", seen.stalled, 10);
    }
    // A transaction that is rolled back leaves nothing to take over.
    if cell.contract != Contract::Transactional {
        expect("takeovers", seen.takeovers, faults / 20);
    }
    failures
}

fn print_table(all: &[Found], kinds: &BTreeSet<Kind>) {
    println!();
    println!(
        "| store/contract         | faults | kinds | operations |  keys | firsts | replays | in progress | mismatches | takeovers | unanswered | violations |"
    );
    println!(
        "|------------------------|--------|-------|------------|-------|--------|---------|-------------|------------|-----------|------------|------------|"
    );
    let mut by_kind = BTreeMap::<Kind, u64>::new();
    for Found { cell, faults, keys, seen, failures } in all {
        for (kind, times) in faults {
            *by_kind.entry(*kind).or_default() += times;
        }
        let (kinds, faults) = (faults.len(), faults.values().sum::<u64>());
        let Seen { operations, successes, replays, in_progress, mismatches, takeovers, unknown, stalled: _ } = seen;
        println!(
            "| {:22} | {faults:6} | {kinds:5} | {operations:10} | {keys:5} | {successes:6} | {replays:7} | {in_progress:11} | {mismatches:10} | {takeovers:9} | {unknown:10} | {:10} |",
            cell.name(),
            failures.len(),
        );
    }
    let operations: u64 = all.iter().map(|found| found.seen.operations).sum();
    let faults: u64 = by_kind.values().sum();
    let left_out: Vec<String> = kinds.iter().filter(|kind| !by_kind.contains_key(kind)).map(Kind::to_string).collect();
    let by_kind = by_kind.into_iter().map(|(kind, times)| format!("{times} {kind}"));
    println!("\n{faults} faults: {}", by_kind.collect::<Vec<_>>().join(", "));
    if !left_out.is_empty() {
        println!("too short for: {}", left_out.join(", "));
    }
    println!("{operations} operations");
}
