//! A server in a Docker container.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::keeper::Keeper;
use crate::server::Server;
use crate::{Error, port};

/// Describes the images of one kind of server.
#[derive(Debug)]
pub(crate) struct Image {
    /// The environment variable that names another image. If it is set, the image is used even if there are binaries.
    pub(crate) variable: &'static str,
    pub(crate) default: &'static str,
    /// The program that this machine lacks if a container is needed.
    pub(crate) absent: &'static str,
    /// The Debian package with that program.
    pub(crate) package: &'static str,
    /// The prefix of the names of folders and containers.
    pub(crate) prefix: &'static str,
    /// The port of the server in its container.
    pub(crate) port: u16,
    /// Environment variables, with their values.
    pub(crate) environment: &'static [(&'static str, &'static str)],
    /// A command in the container that succeeds when the server accepts connections.
    pub(crate) is_ready: &'static [&'static str],
    /// A command in the container that prints the version.
    pub(crate) version: &'static [&'static str],
    /// Extracts the version from what the command printed.
    pub(crate) version_in: fn(&str) -> String,
}

impl Image {
    /// Whether the environment variable names an image.
    pub(crate) fn is_named(&self) -> bool {
        std::env::var_os(self.variable).is_some()
    }

    fn missing(&self, docker: &str) -> Error {
        Error::Missing {
            what: format!("{}, and {docker}", self.absent),
            advice: format!(
                "install Debian's package {}, or give Docker an image with {}",
                self.package, self.variable
            ),
        }
    }
}

/// The time limit for pulling an image. Without a network, Docker can wait for minutes.
const PULL: Duration = Duration::from_secs(180);

/// `$@` is the command that makes and starts the container. The keeper waits for it, so that no container appears after the
/// end.
const RUN: &str = r#""$@" </dev/null >>"$folder/log" 2>&1; echo "$?""#;

/// The name of the container is the name of its folder.
const LAST: &str = r#"docker rm --force --volumes "${folder##*/}" >>"$folder/log" 2>&1"#;

#[derive(Debug)]
pub(crate) struct Container {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    _folder: TempDir,
    image: &'static Image,
    name: String,
    port: u16,
    version: String,
    origin: String,
    runs: bool,
}

impl Container {
    /// Starts the program of the image with these arguments.
    pub(crate) fn start(image: &'static Image, words: &[&str]) -> Result<Container, Error> {
        let provided = match std::env::var(image.variable) {
            // A named image that cannot be had is a failure: another server would not do.
            Ok(name) => provide(&name).map_err(|error| Error::failed(format!("{}: {error}", image.variable)))?,
            Err(_) => provide(image.default).map_err(|error| image.missing(&error))?,
        };
        let folder = TempDir::with_prefix(image.prefix).map_err(Error::io("make a temporary folder"))?;
        let name = folder.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let port = port::free()?;
        let command = command(image, &provided, &name, port, words);
        let mut keeper = Keeper::start(None, folder.path(), LAST, command)?;
        let status = keeper.order(RUN)?;
        if status != "0" {
            return Err(keeper.error(format!("docker run {provided} ended with status {status}")));
        }
        let origin = format!("container of {provided}");
        let mut container =
            Container { keeper, _folder: folder, image, name, port, version: String::new(), origin, runs: true };
        container.wait_until_ready()?;
        container.version = (image.version_in)(&container.execute(image.version)?);
        Ok(container)
    }

    fn execute(&self, command: &[&str]) -> Result<String, Error> {
        docker(&[&["exec", &self.name], command].concat())
    }

    fn wait_until_ready(&self) -> Result<(), Error> {
        self.keeper.wait_until("did not accept connections", || {
            if docker(&["inspect", "--format", "{{.State.Running}}", &self.name])?.trim() != "true" {
                let what = "the container ended while its server started".into();
                return Err(Error::Failed { what, log: self.log()? });
            }
            Ok(self.execute(self.image.is_ready).is_ok())
        })
    }

    fn tell(&self, order: &str) -> Result<(), Error> {
        docker(&[order, &self.name]).map(drop)
    }
}

/// Finds the image on this machine or pulls it. If neither works, returns the reason.
fn provide(image: &str) -> Result<String, String> {
    if docker(&["info"]).is_err() {
        return Err("Docker does not answer".into());
    }
    if docker(&["image", "inspect", image]).is_ok() {
        return Ok(image.into());
    }
    let mut pull = Command::new("docker");
    pull.args(["pull", "--quiet", image]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let failed = |error| format!("docker pull {image}: {error}");
    let mut pull = pull.spawn().map_err(failed)?;
    let start = Instant::now();
    loop {
        match pull.try_wait().map_err(failed)? {
            Some(status) if status.success() => return Ok(image.into()),
            Some(_) => return Err(format!("Docker cannot get the image {image}")),
            None if start.elapsed() > PULL => {
                // It may have ended just now, which does no harm.
                let _ = pull.kill();
                let _ = pull.wait();
                return Err(format!("Docker did not get the image {image} within {} s", PULL.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn command(image: &Image, provided: &str, name: &str, port: u16, words: &[&str]) -> Vec<OsString> {
    let publish = format!("127.0.0.1:{port}:{}", image.port);
    let mut command = vec!["docker", "run", "--detach", "--name", name, "--publish", &publish];
    let variables: Vec<String> = image.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    command.extend(variables.iter().flat_map(|variable| ["--env", variable]));
    command.push(provided);
    command.extend(words);
    command.into_iter().map(OsString::from).collect()
}

/// Runs `docker` and returns its output.
fn docker(args: &[&str]) -> Result<String, Error> {
    let output = Command::new("docker").args(args).stdin(Stdio::null()).output().map_err(Error::io("run docker"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let log = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    Err(Error::Failed { what: format!("docker {}: {}", args.join(" "), output.status), log })
}

impl Server for Container {
    fn port(&self) -> u16 {
        self.port
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn origin(&self) -> &str {
        &self.origin
    }

    fn log(&self) -> Result<String, Error> {
        let output = Command::new("docker").args(["logs", &self.name]).output().map_err(Error::io("run docker"))?;
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn start_again(&mut self) -> Result<(), Error> {
        if self.runs {
            return Err(Error::failed("the server is running already"));
        }
        self.tell("start")?;
        self.runs = true;
        self.wait_until_ready()
    }

    fn stop(&mut self) -> Result<(), Error> {
        if self.runs {
            // The image chooses the signal: for Postgres, that of the fast mode.
            docker(&["stop", "--time=60", &self.name])?;
            self.runs = false;
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<(), Error> {
        if self.runs {
            // The container ends with its first process.
            self.tell("kill")?;
            self.runs = false;
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), Error> {
        self.tell("pause")
    }

    fn resume(&mut self) -> Result<(), Error> {
        self.tell("unpause")
    }
}
