//! Runs the suite against every framework, store and contract. Prints a matrix of the results, and the differences between the
//! frameworks' answers, of which there must be none.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

#[path = "../payments/support/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros, reason = "the other tests of whole systems use more of it")]
mod support;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use idem_http_suite::{CASES, Contract, Protocol, Report, differences, run};
use support::{Backend, Framework, Server, Setup};

/// The name of the test for test runners.
const NAME: &str = "every_framework_gives_the_same_answers_on_every_store";

/// The stores, by the names that the matrix shows. Add a new store here, or to those that run when they are named.
const STORES: &[(&str, Backend)] = &[
    ("memory", Backend::Memory),
    ("sqlite", Backend::Sqlite),
    ("postgres", Backend::Postgres),
    ("own-pool", Backend::OwnPool),
    ("joined", Backend::Joined),
    ("pgbouncer", Backend::PgBouncer),
    ("redis", Backend::Redis),
    ("sentinel", Backend::RedisSentinel),
    ("cluster", Backend::RedisCluster),
    ("hybrid", Backend::Hybrid),
];

/// They run only if they are named, because not every machine has their servers.
const NAMED: &[(&str, Backend)] = &[("mariadb", Backend::MariaDb)];

/// Longer timeouts, because a busy machine takes seconds for what usually takes milliseconds.
///
/// The cache's is shorter: a request that finds a claim in the cache waits for that long, and a thousand do so one after the
/// other.
const PATIENT: &[&str] = &["--store-timeout-ms", "25000", "--cache-timeout-ms", "2000", "--backoff-ms", "6000"];

/// The number of concurrent cells; most of their time is waiting.
const AT_ONCE: usize = 4;

/// The limit for the server's peak memory, with bodies of megabytes and more than a thousand waiting clients.
const MEMORY_LIMIT_BYTES: u64 = 512 * 1024 * 1024;

/// What the comparison ignores.
const NOT_COMPARED: &str = "(compared without: Date, Content-Length, Transfer-Encoding, Connection; the order of fields of different names; \
the seconds of Retry-After; ids and times, whose place is compared; what middleware for CORS and compression adds; and answers \
that depend on who is faster, or that the framework gives without asking the layer or the page)";

/// The results for one store, contract and framework.
struct Cell {
    store: &'static str,
    contract: Contract,
    framework: Framework,
    report: Report,
    took: Duration,
    memory_bytes: u64,
}

fn main() -> ExitCode {
    // The servers inherit the limit.
    idem_http_suite::allow_many_connections();
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "--list") {
        if !args.iter().any(|arg| arg == "--ignored") {
            println!("{NAME}: test");
        }
        return ExitCode::SUCCESS;
    }
    let filters: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with('-')).collect();
    let is_meant = |store: &str| filters.iter().any(|filter| *filter == store || NAME.contains(filter));
    let stores = STORES.iter().filter(|(store, _)| filters.is_empty() || is_meant(store));
    let stores: Vec<_> = stores.chain(NAMED.iter().filter(|(store, _)| filters.contains(store))).collect();
    if stores.is_empty() {
        return ExitCode::SUCCESS;
    }
    judge(&fill(&stores))
}

fn fill(stores: &[&(&'static str, Backend)]) -> Vec<Cell> {
    let frameworks = |&&(store, backend): &&(&'static str, Backend)| {
        let contracts = backend.contracts().iter();
        contracts.flat_map(move |&contract| {
            frameworks_on(backend).iter().map(move |&framework| (store, backend, contract, framework))
        })
    };
    let places: Vec<_> = stores.iter().flat_map(frameworks).collect();
    println!("running {} cases on {} stores, in {} cells, {AT_ONCE} at once", CASES.len(), stores.len(), places.len());
    let (next, cells) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(store, backend, contract, framework)) = places.get(number) else { return };
                    let server = Server::start_on(Setup { framework, backend }, contract, PATIENT);
                    let began = Instant::now();
                    let report = run(server.address, contract);
                    let (took, memory_bytes) = (began.elapsed(), peak_memory(&server));
                    let cell = Cell { store, contract, framework, report, took, memory_bytes };
                    cells.lock().unwrap().insert(number, cell);
                }
            });
        }
    });
    cells.into_inner().unwrap().into_values().collect()
}

/// Hyper uses the same layer as axum, so one store shows what axum adds to it.
fn frameworks_on(backend: Backend) -> &'static [Framework] {
    match backend {
        Backend::Sqlite => &[Framework::Axum, Framework::Actix, Framework::Hyper],
        _ => &Framework::ALL,
    }
}

/// The peak memory of the server, in bytes.
fn peak_memory(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process_id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn judge(cells: &[Cell]) -> ExitCode {
    for protocol in Protocol::ALL {
        let count = CASES.iter().filter(|case| case.runs_over(protocol)).count();
        println!("\n{count} of {} cases run over {}", CASES.len(), protocol.name());
        for case in CASES.iter().filter(|case| !case.runs_over(protocol)) {
            println!("  not {}: {}", case.name, case.only.map_or("", |(_, why)| why));
        }
    }
    println!("\nhow many passed over HTTP/1.1 + HTTP/2, in how long, and the server's peak of memory\n");
    println!("| store     | contract      | framework |        passed |   time | memory |");
    println!("|-----------|---------------|-----------|---------------|--------|--------|");
    for cell in cells {
        let Cell { store, contract, framework, report, took, memory_bytes } = cell;
        let (contract, framework, mebibytes) = (contract.name(), framework.name(), memory_bytes >> 20);
        let (score, seconds) = (report.score(), took.as_secs_f32());
        println!("| {store:9} | {contract:13} | {framework:9} | {score:>13} | {seconds:4.1} s | {mebibytes:2} MiB |");
    }
    let mut failures = Vec::new();
    for cell in cells {
        let place = format!("{} on {} under {}", cell.framework.name(), cell.store, cell.contract.name());
        failures.extend(cell.report.failed.iter().map(|(case, reason)| format!("{place}: {case}: {reason}")));
        let by_protocol = cell.report.differences_of_protocols();
        failures.extend(by_protocol.iter().map(|what| format!("HTTP/1.1 and HTTP/2 differ by {place}: {what}")));
        if cell.memory_bytes > MEMORY_LIMIT_BYTES {
            failures.push(format!("{place}: the server had {} MiB", cell.memory_bytes >> 20));
        }
    }
    let differing = frameworks_differ(cells);
    let answers: usize = cells.iter().flat_map(|cell| cell.report.transcripts.values().map(Vec::len)).sum();
    println!("\naxum differs from actix and from hyper alone in {} of {answers} answers", differing.len());
    println!("{NOT_COMPARED}");
    for failure in failures.iter().chain(&differing) {
        println!("\n{failure}");
    }
    if failures.is_empty() && differing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compares status, header fields and body of every answer with the answer of the first framework.
fn frameworks_differ(cells: &[Cell]) -> Vec<String> {
    let mut differing = Vec::new();
    for place in cells.chunk_by(|one, next| (one.store, one.contract) == (next.store, next.contract)) {
        let Some((first, others)) = place.split_first() else { continue };
        assert!(!others.is_empty(), "a framework is missing on {}", first.store);
        for other in others {
            let place = format!("{} and {} on {}", first.framework.name(), other.framework.name(), first.store);
            let differences = differences(&first.report, &other.report);
            differing.extend(differences.iter().map(|what| format!("{place} under {}: {what}", first.contract.name())));
        }
    }
    differing
}
