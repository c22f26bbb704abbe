//! Makes payments while their containers are paused, killed, restarted and cut off. Each key has one effect, replays are equal
//! byte for byte, and no client waits for long once a server is back.

mod client;
mod fault;

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_http_suite::{Contract, Request};
use tokio::task::{JoinSet, spawn_blocking};

use crate::Error;
use crate::container::{Container, Network};
use crate::example::{Example, FRAMEWORKS, Setup, Store};
use crate::images::Images;
use crate::servers::{self, Servers};
use client::{Payment, TENANT, Watch, work};
use fault::Fault;

const CLIENTS: usize = 6;

const LEASE: Duration = Duration::from_secs(3);

/// How much longer than a lease a client may wait after a server is back. Dead connections time out one after the other, and
/// the machine may be busy.
const MARGIN: Duration = Duration::from_secs(20);

/// How long a fault lasts, and the calm after it.
const TROUBLE: Duration = Duration::from_secs(3);
const CALM: Duration = Duration::from_secs(4);

const SETTINGS: [&str; 2] = ["--lease-ms", "3000"];

/// Applies every fault to Postgres and Redis in turn. Other suites share these servers, so this suite comes last.
pub(crate) async fn run(network: &Network, images: &Images, servers: &Servers) -> Result<(), Error> {
    let mut examples = Vec::new();
    for framework in FRAMEWORKS {
        let (store, contract) = (Store::Hybrid, Contract::Transactional);
        let setup = Setup { store, contract, framework, records: "faults", more: &SETTINGS };
        examples.push(Example::start(network, images, servers, setup).await?);
    }
    let addresses: Vec<_> = examples.iter().map(|example| example.address).collect();
    let watch = Arc::new(Watch::new());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let (watch, addresses) = (Arc::clone(&watch), addresses.clone());
        clients.spawn_blocking(move || work(number, &addresses, &watch));
    }
    let struck = strike_all(network, servers, &watch).await;
    watch.end();
    let mut payments = Vec::new();
    while let Some(paid) = clients.join_next().await {
        payments.extend(paid??);
    }
    let heals = struck?;
    judge(&payments, &heals)?;
    let (address, keys) = (addresses[0], payments.len());
    let replayed = spawn_blocking(move || client::replay_all(&addresses, &payments)).await?;
    let effects = Request::get("/v1/ledger").tenant(TENANT).send(address).json()["effects"].as_u64();
    let effects = effects.ok_or("the ledger does not say how many effects there are")?;
    println!("{keys} keys, {effects} effects, {} replays compared", replayed?);
    if u64::try_from(keys) != Ok(effects) {
        return Err(format!("{keys} keys moved money {effects} times").into());
    }
    Ok(())
}

/// Returns the times at which the faults were healed.
async fn strike_all(network: &Network, servers: &Servers, watch: &Watch) -> Result<Vec<Instant>, Error> {
    println!("\n| server   | fault      | answered | refused | answered in the calm after |");
    println!("|----------|------------|----------|---------|----------------------------|");
    let mut heals = Vec::new();
    tokio::time::sleep(CALM).await;
    for fault in Fault::ALL {
        for (name, server) in [("postgres", &servers.postgres), ("redis", &servers.redis)] {
            fault.strike(network, server).await?;
            let before = watch.counts();
            tokio::time::sleep(TROUBLE).await;
            let meanwhile = watch.counts() - before;
            fault.heal(network, server).await?;
            wait_until_back(name, server).await?;
            heals.push(Instant::now());
            let before = watch.counts();
            tokio::time::sleep(CALM).await;
            let after = watch.counts() - before;
            let fault = fault.name();
            println!(
                "| {name:8} | {fault:10} | {:8} | {:7} | {:26} |",
                meanwhile.answered, meanwhile.refused, after.answered
            );
            // Without Postgres only replays are answered. More answers mean that the fault did not happen.
            if name == "postgres" && meanwhile.answered > CLIENTS as u64 {
                return Err(format!("{fault} of {name} was not felt").into());
            }
        }
    }
    Ok(heals)
}

async fn wait_until_back(name: &str, server: &Container) -> Result<(), Error> {
    match name {
        "postgres" => servers::wait_for_postgres(server).await,
        _ => servers::wait_for_redis(server).await,
    }
}

/// Checks how long clients waited for their answer after the last heal before it, if that fell into the request.
fn judge(payments: &[Payment], heals: &[Instant]) -> Result<(), Error> {
    let waited = payments.iter().map(|payment| {
        let healed = heals.iter().rfind(|healed| **healed <= payment.ended);
        payment.ended - healed.copied().unwrap_or(payment.began).max(payment.began)
    });
    let longest = waited.max().ok_or("nobody paid")?;
    println!("\nno client waited longer than {:.1} s after its server was back", longest.as_secs_f32());
    if longest > LEASE + MARGIN {
        return Err(format!("a client waited {longest:?}, and the lease is {LEASE:?}").into());
    }
    Ok(())
}
