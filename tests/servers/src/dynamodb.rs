//! Private emulators of DynamoDB.

use std::ffi::OsString;

use crate::broker::Broker;
use crate::{Error, programs};

/// An emulator of DynamoDB on a free port of 127.0.0.1, which takes any credentials and keeps its tables in memory.
///
/// It is gone when the value is dropped, or when its process ends in whatever way.
#[derive(Debug)]
pub struct DynamoDb {
    broker: Broker,
}

/// Serves moto, one request after the other: it checks a condition and writes without a lock between them. It refuses an action as AWS
/// does for DynamoDB, and not in XML.
const MOTO: &str = "
import sys
import moto.iam.access_control
from moto.core.exceptions import JsonRESTError
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
moto.iam.access_control.AccessDeniedError = lambda user_arn, action: JsonRESTError(
    'AccessDeniedException', f'User: {user_arn} is not authorized to perform: {action}')
server = make_server('127.0.0.1', int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
print('ready', flush=True)
server.serve_forever()";

impl DynamoDb {
    /// Starts moto, an emulator in Python. The program is the `python3` beside its `moto_server`.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `moto_server`.
    /// - An error with its log if it is not ready within a minute.
    pub fn moto() -> Result<DynamoDb, Error> {
        let python = programs::find("moto_server").map(|program| program.with_file_name("python3"));
        let python = python.ok_or_else(|| missing("moto_server"))?;
        DynamoDb::start("ready", move |port| {
            [python.clone().into(), "-c".into(), MOTO.into(), port.to_string().into()].into()
        })
    }

    /// Starts dynoxide, an emulator in Rust on SQLite.
    ///
    /// # Errors
    ///
    /// As [`moto`](Self::moto), if this machine has no `dynoxide`.
    pub fn dynoxide() -> Result<DynamoDb, Error> {
        let program = programs::find("dynoxide").ok_or_else(|| missing("dynoxide"))?;
        DynamoDb::start("listening on", move |port| {
            [program.clone().into(), "serve".into(), "--port".into(), port.to_string().into()].into()
        })
    }

    fn start(ready: &'static str, words: impl Fn(u16) -> Vec<OsString>) -> Result<DynamoDb, Error> {
        Broker::start(ready, |_, port| Ok(words(port))).map(|broker| DynamoDb { broker })
    }

    /// The URL: `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.broker.port())
    }

    /// Crashes it: `kill -9`. Its tables are gone.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.broker.kill()
    }
}

fn missing(program: &str) -> Error {
    Error::Missing {
        what: format!("`{program}` is not on PATH"),
        advice: "`cargo xtask test-dynamodb` installs it into the target folder".into(),
    }
}
