//! Python libraries for the same purpose, on the same Redis.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use idem_redis::{RedisConfig, RedisStore};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::contest::{Contestant, Sample, hold};
use crate::drive::driven;
use crate::error::Error;
use crate::outside::file;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::servers;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let Some(python) = python().await? else {
        report.note("peers in Python were left out: there is no python3 with venv".to_owned());
        return Ok(());
    };
    let redis = servers::redis()?;
    let maker = Maker::new(Arc::new(RedisStore::open(RedisConfig::new(redis.url())).await?));
    let idem = driven("idem", 1, pace.turn, &Arc::default(), maker.cycles());
    let mut contestants = vec![idem];
    for peer in ["aws-lambda-powertools", "asgi-idempotency-header"] {
        let (python, port) = (&python, redis.port());
        contestants.push(Contestant::new(peer, move |round| async move {
            let mut command = Command::new(python);
            // Their deprecation warnings do not matter here.
            command.args(["-W", "ignore"]).arg(file("peers/peers.py")).args([
                peer,
                &port.to_string(),
                &pace.turn.as_secs_f64().to_string(),
            ]);
            command.arg(round.to_string()).stdout(Stdio::piped()).kill_on_drop(true);
            let mut process = command.spawn()?;
            let said = process.stdout.take().ok_or("it says nothing")?;
            let line = BufReader::new(said).lines().next_line().await?.ok_or("it ended without a rate")?;
            process.wait().await?;
            Ok(Sample { per_second: line.trim().parse()?, ..Sample::default() })
        }));
    }
    report.add(hold("Redis: an operation, 1 client, beside libraries in Python", pace.rounds, contestants).await?);
    Ok(())
}

/// A Python with the peers, in the build folder.
async fn python() -> Result<Option<PathBuf>, Error> {
    let folder = file("target/peers");
    let python = folder.join("bin/python");
    if !python.is_file() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&folder).status().await;
        if !made.is_ok_and(|status| status.success()) {
            return Ok(None);
        }
    }
    let requirements = file("peers/requirements.txt");
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(requirements);
    Ok(install.status().await?.success().then_some(python))
}
