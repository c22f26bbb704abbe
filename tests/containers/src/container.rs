//! A container on the network of a run.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use testcontainers::core::{CmdWaitFor, ExecCommand};
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerAsync, ContainerRequest, GenericImage, ImageExt};

use crate::Error;

/// What the networks of all runs are called in the beginning; then comes the id of the process.
pub(crate) const FAMILY: &str = "idem-containers-";

/// The label with the id of the process that started a container.
pub(crate) const LABEL: &str = "idem-containers.process";

/// How long a server may take to answer on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often it is asked meanwhile.
const PERIOD: Duration = Duration::from_millis(100);

/// The private network of a run. It is made with its first container, and goes with its last.
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

    /// What other containers call the one of this name.
    pub(crate) fn host(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    /// Starts a container.
    ///
    /// None of its ports is published: it asks nobody for a password, and this machine reaches its address as it is.
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

/// The library wants the tag by itself; without one it is Docker's own default. The port of a registry is none.
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
    /// Its name, by which others on its network reach it also after its address has changed.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Where this machine and others reach it at the moment.
    pub(crate) async fn address(&self) -> Result<IpAddr, Error> {
        Ok(self.container.get_bridge_ip_address().await?)
    }

    /// The same with a port.
    pub(crate) async fn socket(&self, port: u16) -> Result<SocketAddr, Error> {
        Ok((self.address().await?, port).into())
    }

    /// Whether a command in it succeeds.
    pub(crate) async fn execute(&self, words: &[&str]) -> Result<(), Error> {
        let command = ExecCommand::new(words.iter().copied()).with_cmd_ready_condition(CmdWaitFor::exit_code(0));
        self.container.exec(command).await.map_err(|error| format!("{}: {}: {error}", self.host, words.join(" ")))?;
        Ok(())
    }

    /// What a command in it prints.
    pub(crate) async fn output_of(&self, words: &[&str]) -> Result<String, Error> {
        let command = ExecCommand::new(words.iter().copied());
        let failed = |error| format!("{}: {}: {error}", self.host, words.join(" "));
        let mut executed = self.container.exec(command).await.map_err(failed)?;
        let printed = executed.stdout_to_vec().await.map_err(failed)?;
        Ok(String::from_utf8_lossy(&printed).trim().to_owned())
    }

    /// Asks until there is no objection any more. The error shows the last one, and what the container said.
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

    /// Waits until somebody accepts connections.
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
