//! A server in a Docker container.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Server, version_in};
use crate::keeper::Keeper;
use crate::{Error, port};

/// The environment variable that names another image, which then is used even where there are binaries.
pub(super) const IMAGE_VARIABLE: &str = "IDEM_POSTGRES_IMAGE";

const IMAGE: &str = "postgres:17";

/// How long an image may take to come. Without a network, Docker can wait for minutes.
const PULL: Duration = Duration::from_secs(180);

/// `$@` is the command that makes and starts the container; the keeper waits for it, so that none appears after the end.
const RUN: &str = r#""$@" </dev/null >>"$folder/log" 2>&1; echo "$?""#;

/// The name of the container is the name of its folder.
const LAST: &str = r#"docker rm --force --volumes "${folder##*/}" >>"$folder/log" 2>&1"#;

#[derive(Debug)]
pub(super) struct Container {
    // Before the folder, which the keeper removes itself.
    keeper: Keeper,
    _folder: TempDir,
    name: String,
    port: u16,
    version: String,
    origin: String,
    runs: bool,
}

impl Container {
    pub(super) fn start(settings: &[&str]) -> Result<Container, Error> {
        let image = match std::env::var(IMAGE_VARIABLE) {
            // Another server than the image that was asked for would be no help, so none is missing.
            Ok(image) => provide(&image).map_err(|error| Error::failed(format!("{IMAGE_VARIABLE}: {error}")))?,
            Err(_) => provide(IMAGE).map_err(|error| missing(&error))?,
        };
        let folder = TempDir::with_prefix("idem-postgres-").map_err(Error::io("make a temporary folder"))?;
        let name = folder.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let port = port::free()?;
        let mut keeper = Keeper::start(None, folder.path(), LAST, command(&image, &name, port, settings))?;
        let status = keeper.order(RUN)?;
        if status != "0" {
            return Err(keeper.error(format!("docker run {image} ended with status {status}")));
        }
        let origin = format!("container of {image}");
        let mut container =
            Container { keeper, _folder: folder, name, port, version: String::new(), origin, runs: true };
        container.wait_until_ready()?;
        container.version = version_in(&docker(&["exec", &container.name, "postgres", "--version"])?);
        Ok(container)
    }

    /// Over TCP, as the image initialises its data with a server that has only a socket.
    fn wait_until_ready(&self) -> Result<(), Error> {
        self.keeper.wait_until("did not accept connections", || {
            if docker(&["inspect", "--format", "{{.State.Running}}", &self.name])?.trim() != "true" {
                let output =
                    Command::new("docker").args(["logs", &self.name]).output().map_err(Error::io("run docker"))?;
                let log = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(Error::Failed { what: "the container ended while its server started".into(), log });
            }
            Ok(docker(&["exec", &self.name, "pg_isready", "--host=127.0.0.1", "--username=postgres"]).is_ok())
        })
    }

    fn tell(&self, order: &str) -> Result<(), Error> {
        docker(&[order, &self.name]).map(drop)
    }
}

fn missing(docker: &str) -> Error {
    Error::Missing {
        what: format!("`initdb` and `postgres` are neither on PATH nor under /usr/lib/postgresql, and {docker}"),
        advice: format!("install Debian's package postgresql, or give Docker an image with {IMAGE_VARIABLE}"),
    }
}

/// Finds the image on this machine, or gets it; otherwise says why not.
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
                // It may have ended in this moment, which is as good.
                let _ = pull.kill();
                let _ = pull.wait();
                return Err(format!("Docker did not get the image {image} within {} s", PULL.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn command(image: &str, name: &str, port: u16, settings: &[&str]) -> Vec<OsString> {
    let publish = format!("127.0.0.1:{port}:5432");
    let mut command = vec!["docker", "run", "--detach", "--name", name, "--publish", &publish];
    command.extend(["--env", "POSTGRES_HOST_AUTH_METHOD=trust", image, "postgres"]);
    command.extend(["max_connections=200"].iter().chain(settings).flat_map(|setting| ["-c", setting]));
    command.into_iter().map(OsString::from).collect()
}

/// What `docker` prints.
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
            // The image asks for SIGINT, which is the fast mode.
            docker(&["stop", "--time=60", &self.name])?;
            self.runs = false;
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<(), Error> {
        if self.runs {
            // Everything in the container dies with its first process.
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
