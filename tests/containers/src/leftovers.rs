//! Removes what a run leaves behind.

use std::path::Path;

use crate::Error;
use crate::container::{FAMILY, LABEL};
use crate::docker::docker;

/// Removes the containers and networks of runs that were killed: those whose process does not exist any more.
pub(crate) async fn remove_of_the_dead() -> Result<(), Error> {
    let printed = docker(&["network", "ls", "--filter", &format!("name={FAMILY}"), "--format", "{{.Name}}"]).await?;
    for network in printed.lines() {
        let process = network.strip_prefix(FAMILY).unwrap_or_default();
        if process.parse::<u32>().is_ok() && !Path::new("/proc").join(process).exists() {
            println!("{network}: left over by a run that was killed, and removed");
            remove(process, network).await?;
        }
    }
    Ok(())
}

/// Removes what is left of this run.
pub(crate) async fn remove_own() -> Result<(), Error> {
    let process = std::process::id().to_string();
    remove(&process, &format!("{FAMILY}{process}")).await
}

async fn remove(process: &str, network: &str) -> Result<(), Error> {
    let printed = docker(&["ps", "--all", "--quiet", "--filter", &format!("label={LABEL}={process}")]).await?;
    let containers: Vec<&str> = printed.lines().collect();
    if !containers.is_empty() {
        docker(&[&["rm", "--force", "--volumes"], containers.as_slice()].concat()).await?;
    }
    let printed = docker(&["network", "ls", "--quiet", "--filter", &format!("name=^{network}$")]).await?;
    if !printed.is_empty() {
        docker(&["network", "rm", network]).await?;
    }
    Ok(())
}
