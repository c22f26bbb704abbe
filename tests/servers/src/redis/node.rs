//! One process of Redis: a server, a Sentinel, or a node of a cluster.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use super::{Reply, redis_command};
use crate::keeper::{self, Keeper};
use crate::server::Server;
use crate::{Error, processes, programs};

/// A Redis program; its configuration decides whether it is a server or a Sentinel.
#[derive(Debug, Clone)]
pub(super) struct Program {
    path: PathBuf,
    version: String,
    origin: String,
}

impl Program {
    /// Finds the program of this name; Debian's package has the same name.
    pub(super) fn find(name: &str) -> Result<Program, Error> {
        // Symbolic links are not resolved, because the program acts by the name under which it is called.
        let path = programs::find(name).ok_or_else(|| Error::Missing {
            what: format!("`{name}` is not on PATH"),
            advice: format!("install it (Debian's package is {name})"),
        })?;
        let output = Command::new(&path).arg("--version").output().map_err(Error::io(format!("run {name}")))?;
        let (version, origin) = (version_in(&String::from_utf8_lossy(&output.stdout)), path.display().to_string());
        Ok(Program { path, version, origin })
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    pub(super) fn origin(&self) -> &str {
        &self.origin
    }
}

#[derive(Debug)]
pub(super) struct Node {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    _folder: TempDir,
    program: Program,
    port: u16,
    /// The process id while it runs.
    server: Option<u32>,
    is_paused: bool,
}

impl Node {
    /// Starts a process on a port from `free`. Its configuration file holds the port and `configuration`, and the process may
    /// change that file. `settings` are command-line arguments.
    pub(super) fn start(
        program: &Program,
        free: impl Fn() -> Result<u16, Error>,
        configuration: &str,
        settings: &[&str],
    ) -> Result<Node, Error> {
        /// Another process may take the port before the server does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        loop {
            match Node::start_once(program, free()?, configuration, settings) {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && log.contains("Address already in use") => {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    fn start_once(program: &Program, port: u16, configuration: &str, settings: &[&str]) -> Result<Node, Error> {
        const FILE: &str = "redis.conf";
        let folder = TempDir::with_prefix("idem-redis-").map_err(Error::io("make a temporary folder"))?;
        let text = format!("bind 127.0.0.1\nport {port}\n{configuration}");
        std::fs::write(folder.path().join(FILE), text).map_err(Error::io("write a file"))?;
        // The keeper works in the folder, and so does the server.
        let words = [program.path.clone().into(), FILE.into()].into_iter();
        let words = words.chain(settings.iter().map(OsString::from));
        // Unlike the other servers, Redis may run as root.
        let keeper = Keeper::start(None, folder.path(), keeper::KILL, words)?;
        let mut node = Node { keeper, _folder: folder, program: program.clone(), port, server: None, is_paused: false };
        node.start_again()?;
        Ok(node)
    }

    /// Whether it runs and is not paused.
    pub(super) fn is_up(&self) -> bool {
        self.server.is_some() && !self.is_paused
    }

    pub(super) fn ask<W: AsRef<[u8]>>(&self, words: &[W]) -> Result<Reply, Error> {
        redis_command(self.port, words)
    }

    /// [`Keeper::wait_until`], with the log of this process.
    pub(super) fn wait_until(
        &self,
        otherwise: &str,
        reached: impl FnMut() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        self.keeper.wait_until(otherwise, reached)
    }

    fn wait_until_ready(&self, server: u32) -> Result<(), Error> {
        let id = server.to_string();
        self.keeper.wait_until("did not answer", || {
            if !processes::is_running(server)? {
                return Err(self.keeper.error("the server ended while it started"));
            }
            // The server does not answer yet, or another process answers on the port.
            let Ok(info) = self.ask(&["INFO"]) else { return Ok(false) };
            // A Sentinel loads nothing, and has no such field.
            Ok(info.field("process_id") == Some(&id) && info.field("loading").is_none_or(|loading| loading == "0"))
        })
    }

    fn end(&mut self, signal: &str) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        self.keeper.signal(signal, &[server])?;
        // A paused server must be resumed to end.
        self.keeper.signal("CONT", &[server])?;
        self.keeper.reap(server)?;
        self.server = None;
        self.is_paused = false;
        Ok(())
    }

    fn running(&self) -> Result<u32, Error> {
        self.server.ok_or_else(|| Error::failed("the server is not running"))
    }
}

impl Server for Node {
    fn port(&self) -> u16 {
        self.port
    }

    fn version(&self) -> &str {
        self.program.version()
    }

    fn origin(&self) -> &str {
        self.program.origin()
    }

    fn log(&self) -> Result<String, Error> {
        self.keeper.log()
    }

    fn start_again(&mut self) -> Result<(), Error> {
        if self.server.is_some() {
            return Err(Error::failed("the server is running already"));
        }
        let server = self.keeper.start_server()?;
        self.server = Some(server);
        self.wait_until_ready(server).inspect_err(|_| {
            // It can be started again once the obstacle is gone.
            let _ = self.kill();
        })
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.end("TERM")
    }

    fn kill(&mut self) -> Result<(), Error> {
        self.end("KILL")
    }

    fn pause(&mut self) -> Result<(), Error> {
        let server = self.running()?;
        self.keeper.signal("STOP", &[server])?;
        // The signal takes effect a moment later, and a test may rely on the silence.
        let stands_still = |process: &processes::Process| process.id != server || "TZ".contains(process.state);
        self.keeper.wait_until("did not stand still", || Ok(processes::all()?.iter().all(stands_still)))?;
        self.is_paused = true;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Error> {
        let server = self.running()?;
        self.keeper.signal("CONT", &[server])?;
        self.is_paused = false;
        Ok(())
    }
}

/// Extracts `Redis 7.0.15` from `Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=ae4d7c971a948f0`.
pub(super) fn version_in(printed: &str) -> String {
    let number = printed.split_once("v=").and_then(|(_, rest)| rest.split_ascii_whitespace().next());
    format!("Redis {}", number.unwrap_or("of unknown version"))
}

#[cfg(test)]
mod tests {
    use super::version_in;

    #[test]
    fn a_version_is_told_without_its_build() {
        assert_eq!(version_in("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64\n"), "Redis 7.0.15");
        assert_eq!(version_in("something else\n"), "Redis of unknown version");
    }
}
