//! The servers that all tests of a run share, and `cargo xtask with-servers`.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, Stdio};

use idem_servers::{PGBOUNCER_VARIABLE, POSTGRES_VARIABLE, TEMPLATE_VARIABLE};
use idem_servers::{PgBouncer, Postgres, PostgresTemplate};
use idem_servers::{REDIS_CLUSTER_VARIABLE, REDIS_SENTINEL_VARIABLE, REDIS_VARIABLE};
use idem_servers::{Redis, RedisCluster, RedisSentinel};

use crate::command;

/// So few that tests notice if they need a second connection, or leave a transaction open.
const POOL_SIZE: u16 = 2;

/// Debian's packages for everything that may be missing.
const PACKAGES: [&str; 4] = ["postgresql", "pgbouncer", "redis-server", "redis-sentinel"];

/// Syncing is off: it protects from a loss of power, which no test needs, and takes most of the time.
const UNSYNCED: &str = "fsync=off";

/// The shared servers. They stop when this value is dropped, and when this process ends in another way.
#[derive(Debug)]
pub(crate) struct Servers {
    postgres_url: String,
    pgbouncer: PgBouncer,
    redis_url: String,
    sentinel: RedisSentinel,
    cluster: RedisCluster,
    /// The template for the servers that tests start.
    template: Option<PostgresTemplate>,
    _postgres: Option<Postgres>,
    _redis: Option<Redis>,
}

impl Servers {
    /// Starts the servers and prints their origins. `DATABASE_URL` and `REDIS_URL` are used if they are URLs of a Postgres and
    /// a Redis. If not, the binaries of this machine, a container, or Debian's packages are tried in this order.
    pub(crate) fn start() -> Result<Servers, Box<dyn Error>> {
        let (postgres_url, postgres) = start_postgres()?;
        let pgbouncer = or_install(|| PgBouncer::start(&postgres_url, POOL_SIZE))?;
        println!("PgBouncer: {}, {}, {}", pgbouncer.origin(), pgbouncer.version(), pgbouncer.url());
        let (redis_url, redis) = start_redis()?;
        let sentinel = or_install(RedisSentinel::start)?;
        println!("Redis Sentinel: {}, {}, {}", sentinel.origin(), sentinel.version(), sentinel.url());
        let cluster = or_install(RedisCluster::start)?;
        println!("Redis Cluster: {}, {}, {}", cluster.origin(), cluster.version(), cluster.url());
        let template = PostgresTemplate::make()?;
        Ok(Servers {
            postgres_url,
            pgbouncer,
            redis_url,
            sentinel,
            cluster,
            template,
            _postgres: postgres,
            _redis: redis,
        })
    }

    /// Passes the servers' URLs to a command by environment variables.
    pub(crate) fn announce<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        if let Some(template) = &self.template {
            command.env(TEMPLATE_VARIABLE, template.path());
        }
        // The command line enables TLS in a build of the workspace. The driver would ask these servers for it on each connection, and the
        // counts of connections and bytes of some tests would be others.
        command.env("PGSSLMODE", "disable");
        command.env(POSTGRES_VARIABLE, &self.postgres_url).env(PGBOUNCER_VARIABLE, self.pgbouncer.url());
        command.env(REDIS_VARIABLE, &self.redis_url).env(REDIS_SENTINEL_VARIABLE, self.sentinel.url());
        command.env(REDIS_CLUSTER_VARIABLE, self.cluster.url())
    }
}

/// Runs a command with the servers, and returns its exit code; a signal counts as it does in a shell.
pub(crate) fn run(words: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let [program, args @ ..] = words else { return Err("there is no command to run".into()) };
    let servers = Servers::start()?;
    let mut command = Command::new(program);
    let status = servers.announce(command.args(args)).status();
    let status = status.map_err(|error| format!("{}: {error}", program.display()))?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

/// The URL of a Postgres, and the server itself if this process started it.
fn start_postgres() -> Result<(String, Option<Postgres>), Box<dyn Error>> {
    if let Some(url) = given_postgres()? {
        return Ok((url, None));
    }
    let postgres = or_install(|| Postgres::start_with(&[UNSYNCED]))?;
    println!("Postgres: {}, {}, port {}", postgres.origin(), postgres.version(), postgres.port());
    Ok((postgres.url(), Some(postgres)))
}

/// The URL of a Redis, and the server itself if this process started it.
fn start_redis() -> Result<(String, Option<Redis>), Box<dyn Error>> {
    if let Some(url) = given_redis()? {
        return Ok((url, None));
    }
    let redis = or_install(Redis::start)?;
    println!("Redis: {}, {}, port {}", redis.origin(), redis.version(), redis.port());
    Ok((redis.url(), Some(redis)))
}

/// The server that `DATABASE_URL` names, if it is one of Postgres. It must answer.
fn given_postgres() -> Result<Option<String>, Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL").unwrap_or_default();
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Ok(None);
    }
    // The URL is not printed, because it may contain a password.
    println!(
        "Postgres: DATABASE_URL, {}",
        version_of_postgres(&url).map_err(|error| format!("DATABASE_URL: {error}"))?
    );
    Ok(Some(url))
}

/// Asks with `psql`, which supports every login method.
fn version_of_postgres(url: &str) -> Result<String, Box<dyn Error>> {
    let Some(psql) = idem_servers::find_program("psql") else {
        return Ok("of unknown version (there is no psql to ask with)".into());
    };
    let mut command = Command::new(psql);
    command.args(["--no-psqlrc", "--no-password", "--tuples-only", "--no-align", "--command", "SHOW server_version"]);
    let output = command.arg(url).env("PGCONNECT_TIMEOUT", "10").stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().into());
    }
    let printed = String::from_utf8(output.stdout)?;
    Ok(format!("PostgreSQL {}", printed.split_ascii_whitespace().next().unwrap_or("of unknown version")))
}

/// The server that `REDIS_URL` names, if it is one of Redis. It must answer.
fn given_redis() -> Result<Option<String>, Box<dyn Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_default();
    if !url.starts_with("redis://") && !url.starts_with("rediss://") {
        return Ok(None);
    }
    println!("Redis: REDIS_URL, {}", version_of_redis(&url).map_err(|error| format!("REDIS_URL: {error}"))?);
    Ok(Some(url))
}

/// Asks with `redis-cli`, which supports every login method.
fn version_of_redis(url: &str) -> Result<String, Box<dyn Error>> {
    let Some(program) = idem_servers::find_program("redis-cli") else {
        return Ok("of unknown version (there is no redis-cli to ask with)".into());
    };
    let output = Command::new(program).args(["-u", url, "INFO", "server"]).stdin(Stdio::null()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    // `redis-cli` prints an error of the server like an answer.
    match printed.lines().find_map(|line| line.strip_prefix("redis_version:")) {
        Some(version) => Ok(format!("Redis {version}")),
        None => Err(format!("{}{printed}", String::from_utf8_lossy(&output.stderr)).trim().into()),
    }
}

/// Installs the programs that a long check with these options needs, or fails with installation advice. Postgres and Redis may
/// also run in containers; PgBouncer, Sentinels and clusters may not.
pub(crate) fn provide(options: &[OsString]) -> Result<(), Box<dyn Error>> {
    const PROGRAMS: [&str; 2] = ["pgbouncer", "redis-sentinel"];
    let starts_none = options.iter().any(|option| option == "--help" || option == "--plan");
    let missing = PROGRAMS.iter().find(|name| idem_servers::find_program(name).is_none());
    match missing.filter(|_| !starts_none) {
        None => Ok(()),
        Some(missing) if command::may_install() => {
            println!("{missing} is missing; so Debian's packages {} are installed", PACKAGES.join(" and "));
            command::install(&PACKAGES)
        }
        Some(missing) => Err(format!("{missing} is missing; install it and run this again").into()),
    }
}

/// Starts a server. If its program is missing, installs it first where that is possible.
fn or_install<T>(start: impl Fn() -> Result<T, idem_servers::Error>) -> Result<T, Box<dyn Error>> {
    match start() {
        Err(missing @ idem_servers::Error::Missing { .. }) if command::may_install() => {
            println!("{missing}; so Debian's packages {} are installed", PACKAGES.join(" and "));
            command::install(&PACKAGES)?;
            Ok(start()?)
        }
        result => Ok(result?),
    }
}
