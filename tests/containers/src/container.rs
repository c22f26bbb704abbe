//! A container on the network of a run.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use testcontainers::core::{CmdWaitFor, ExecCommand};
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerAsync, ContainerRequest, GenericImage, ImageExt};

use crate::Error;

/// The prefix of the network names of all runs; the process id follows.
pub(crate) const FAMILY: &str = "idem-containers-";

/// The label with the id of the process that started a container.
pub(crate) const LABEL: &str = "idem-containers.process";

/// The time limit for a server's answer on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often the server is polled.
const PERIOD: Duration = Duration::from_millis(100);

/// The private network of a run. It is made with its first container, and removed with its last.
#[derive(Debug)]
pub(crate) struct Network {
    name: String,
}

impl Network {
    pub(crate) fn new() -> Self {
        Self { name: format!("{FAMILY}{}", std::process::id()) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The host name of a container for other containers.
    pub(crate) fn host(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    /// Starts a container.
    ///
    /// No port is published: the container has no password, and this machine reaches its address directly.
    pub(crate) async fn start(
        &self,
        name: &str,
        image: &str,
        configure: impl FnOnce(ContainerRequest<GenericImage>) -> ContainerRequest<GenericImage>,
    ) -> Result<Container, Error> {
        let (repository, tag) = split(image);
        let request = GenericImage::new(repository, tag)
            .with_network(&self.name)
            .with_container_name(self.host(name))
            .with_label(LABEL, std::process::id().to_string())
            .with_startup_timeout(PATIENCE)
            .with_host_config_modifier(|host| host.publish_all_ports = Some(false));
        let container = configure(request).start().await.map_err(|error| format!("{name}: {error}"))?;
        Ok(Container { container, host: self.host(name) })
    }
}

/// Splits an image into repository and tag, as the library expects. The default tag is Docker's. A registry's port is not a
/// tag.
fn split(image: &str) -> (&str, &str) {
    match image.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (image, "latest"),
    }
}

/// A container that is removed with its data when it is dropped.
#[derive(Debug)]
pub(crate) struct Container {
    container: ContainerAsync<GenericImage>,
    host: String,
}

impl Container {
    /// Its host name on the network, which stays the same when its address changes.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// The current address, for this machine and for other containers.
    pub(crate) async fn address(&self) -> Result<IpAddr, Error> {
        Ok(self.container.get_bridge_ip_address().await?)
    }

    /// The current address with a port.
    pub(crate) async fn socket(&self, port: u16) -> Result<SocketAddr, Error> {
        Ok((self.address().await?, port).into())
    }

    /// Runs a command in it, which must succeed.
    pub(crate) async fn execute(&self, words: &[&str]) -> Result<(), Error> {
        let command = ExecCommand::new(words.iter().copied()).with_cmd_ready_condition(CmdWaitFor::exit_code(0));
        self.container.exec(command).await.map_err(|error| format!("{}: {}: {error}", self.host, words.join(" ")))?;
        Ok(())
    }

    /// Runs a command in it and returns its output.
    pub(crate) async fn output_of(&self, words: &[&str]) -> Result<String, Error> {
        let command = ExecCommand::new(words.iter().copied());
        let failed = |error| format!("{}: {}: {error}", self.host, words.join(" "));
        let mut executed = self.container.exec(command).await.map_err(failed)?;
        let printed = executed.stdout_to_vec().await.map_err(failed)?;
        Ok(String::from_utf8_lossy(&printed).trim().to_owned())
    }

    /// Repeats `check` until it succeeds. The error shows its last failure and the container's log.
    pub(crate) async fn wait_until<T>(&self, mut check: impl AsyncFnMut() -> Result<T, Error>) -> Result<T, Error> {
        let began = Instant::now();
        loop {
            match check().await {
                Ok(value) => return Ok(value),
                Err(error) if began.elapsed() > PATIENCE || !self.container.is_running().await? => {
                    return Err(format!("{}: {error}; it said:\n{}", self.host, self.log().await).into());
                }
                Err(_) => tokio::time::sleep(PERIOD).await,
            }
        }
    }

    /// Waits until the port accepts connections.
    pub(crate) async fn wait_until_it_listens(&self, port: u16) -> Result<SocketAddr, Error> {
        let socket = self.socket(port).await?;
        self.wait_until(async || Ok(tokio::net::TcpStream::connect(socket).await.map(drop)?)).await?;
        Ok(socket)
    }

    async fn log(&self) -> String {
        const LINES: usize = 20;
        let (out, err) = (self.container.stdout_to_vec().await, self.container.stderr_to_vec().await);
        let said = [out.unwrap_or_default(), err.unwrap_or_default()].concat();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}
