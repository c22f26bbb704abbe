//! What an operator waits for on a large table of Postgres: the command line, the first page of the console, and the share of
//! heap-only updates.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use idem_postgres::{PostgresConfig, PostgresStore};
use idem_servers::Postgres;
use sqlx::PgConnection;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::contest::{Spread, hold};
use crate::drive::driven;
use crate::error::Error;
use crate::growth::{fill, text};
use crate::judged::Goal;
use crate::outside::built;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::servers;

/// That of the store by default.
const SCHEMA: &str = "idem";

const RECORDS: u64 = 10_000_000;

/// Records whose process has died, at the end of the table.
const ABANDONED: u64 = 10;

/// Makes them six hours old. The table's other records come from the last twelve hours.
const AGE: &str = "UPDATE idem.idem_records SET created_at = created_at - 21600000000,
    updated_at = updated_at - 21600000000, lease_until = lease_until - 21600000000 WHERE state = 1";

const FIRST_PAGE: Duration = Duration::from_secs(1);
const ALL_RECORDS: Duration = Duration::from_secs(60);

const CLIENTS: usize = 16;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let idem = built("idem-cli", "idem").await?;
    let server = servers::postgres()?;
    let mut connection = servers::connect(&server).await?;
    let records = if pace.quick { 300_000 } else { RECORDS };
    let maker = filled(&server, &mut connection, records).await?;
    let bytes = text(&mut connection, "SELECT pg_table_size('idem.idem_records')::TEXT").await?;
    report.note(format!("operators: {records} records in {bytes} bytes of Postgres, without indexes"));

    let console = Console::start(&idem, &server.url()).await?;
    let page = console.first_page().await?;
    drop(console);
    judge("the first page of the console", page, FIRST_PAGE, report);
    for (arguments, most) in [
        (&["list", "--older-than", "5m"][..], FIRST_PAGE),
        (&["list", "--state", "in-progress", "--older-than", "5m"], ALL_RECORDS),
        (&["stats"], ALL_RECORDS),
    ] {
        let (took, said) = run_idem(&idem, &server.url(), arguments).await?;
        print!("{said}");
        let listed = said.lines().count() as u64;
        if arguments.contains(&"--state") && listed != ABANDONED {
            return Err(format!("{ABANDONED} records are abandoned, and {listed} were listed").into());
        }
        judge(&format!("idem {}", arguments.join(" ")), took, most, report);
    }
    let began = Instant::now();
    // Of a column that no index has, so that the server reads the table.
    text(&mut connection, "SELECT sum(length(body))::TEXT FROM idem.idem_records").await?;
    report.note(format!("operators: one sum over the table by the server took {:.1} s", began.elapsed().as_secs_f64()));
    heap_only(&maker, &mut connection, records, pace, report).await
}

fn judge(what: &str, took: Duration, most: Duration, report: &mut Report) {
    report.note(format!("operators: {what} took {:.2} s", took.as_secs_f64()));
    let spread = Spread::of(vec![took.as_secs_f64() / most.as_secs_f64()]);
    report.judge(&format!("{what}, of {} s", most.as_secs()), Goal::AtMost(1.0), spread);
}

/// A table of settled records, with a few abandoned ones.
async fn filled(server: &Postgres, connection: &mut PgConnection, records: u64) -> Result<Arc<Maker>, Error> {
    let maker = Maker::new(Arc::new(PostgresStore::open(PostgresConfig::new(server.url())).await?));
    // The one that is copied is alone in the table.
    maker.cycle(0).await?;
    fill(connection, SCHEMA, records).await?;
    for number in records..records + ABANDONED {
        maker.acquire(number).await?;
    }
    servers::run(connection, AGE).await?;
    servers::run(connection, "VACUUM (ANALYZE) idem.idem_records;\nCHECKPOINT").await?;
    Ok(maker)
}

/// Runs `idem`, and returns how long it took and what it said.
async fn run_idem(idem: &Path, store: &str, arguments: &[&str]) -> Result<(Duration, String), Error> {
    let began = Instant::now();
    let output = Command::new(idem).args(["--store", store]).args(arguments).output().await?;
    let took = began.elapsed();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("idem {}: {}\n{said}", arguments.join(" "), output.status).into());
    }
    Ok((took, String::from_utf8(output.stdout)?))
}

/// `idem console`, and the address that it printed.
struct Console {
    _process: tokio::process::Child,
    host: String,
    path: String,
}

impl Console {
    async fn start(idem: &PathBuf, store: &str) -> Result<Self, Error> {
        let mut command = Command::new(idem);
        command.args(["--store", store, "console", "--read-only"]).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line).await?;
        let url = line.trim().strip_prefix("http://").and_then(|rest| rest.split_once('/'));
        let (host, path) = url.ok_or_else(|| format!("idem console printed no URL: {line}"))?;
        Ok(Self { _process: process, host: host.to_owned(), path: format!("/{path}") })
    }

    /// How long the first page takes.
    async fn first_page(&self) -> Result<Duration, Error> {
        let began = Instant::now();
        let mut stream = TcpStream::connect(&self.host).await?;
        let request = format!("GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.path, self.host);
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        if !answer.starts_with("HTTP/1.1 200") {
            return Err(format!("the console answered: {answer}").into());
        }
        Ok(began.elapsed())
    }
}

/// How many updates of records changed no index and found room on the page of their row.
async fn heap_only(
    maker: &Arc<Maker>,
    connection: &mut PgConnection,
    records: u64,
    pace: Pace,
    report: &mut Report,
) -> Result<(), Error> {
    let counted = "SELECT n_tup_upd || ' ' || n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'idem_records'";
    let mut counts = Vec::new();
    for is_after in [false, true] {
        if is_after {
            let fresh = Arc::new(AtomicU64::new(2 * records));
            let cycles = driven("idem", CLIENTS, pace.turn, &fresh, maker.cycles());
            report.add(hold("Postgres, cycles on the table of operators", 1, vec![cycles]).await?);
            // Sessions report their statistics at most a second late.
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        let (updates, heap_only) = text(connection, counted)
            .await?
            .split_once(' ')
            .map_or(Ok((0, 0)), |(all, hot)| Ok::<_, Error>((all.parse::<u64>()?, hot.parse::<u64>()?)))?;
        counts.push((updates, heap_only));
    }
    let (updates, heap_only) = (counts[1].0 - counts[0].0, counts[1].1 - counts[0].1);
    report.note(format!("operators: {heap_only} of {updates} updates were heap-only"));
    let share = (updates > 0).then(|| heap_only as f64 / updates as f64);
    report.judge(
        "heap-only updates of all updates",
        Goal::AtLeast(0.95),
        share.and_then(|share| Spread::of(vec![share])),
    );
    Ok(())
}
