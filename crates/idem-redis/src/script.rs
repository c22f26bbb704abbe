//! The scripts, and one call of one of them.

use redis::Cmd;

/// A script with the digest that names it to a server which has seen it.
pub(crate) struct Script {
    source: &'static str,
    hash: String,
}

impl Script {
    fn new(source: &'static str) -> Self {
        Self { source, hash: redis::Script::new(source).get_hash().to_owned() }
    }
}

/// All verbs.
pub(crate) struct Scripts {
    pub(crate) acquire: Script,
    pub(crate) renew: Script,
    pub(crate) checkpoint: Script,
    pub(crate) settle: Script,
    pub(crate) peek: Script,
}

macro_rules! script {
    ($prelude:literal, $name:literal) => {
        Script::new(concat!(
            include_str!(concat!("../lua/", $prelude, ".lua")),
            include_str!(concat!("../lua/", $name, ".lua"))
        ))
    };
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            acquire: script!("record", "acquire"),
            renew: script!("record", "renew"),
            checkpoint: script!("record", "checkpoint"),
            settle: script!("record", "settle"),
            peek: script!("record", "peek"),
        }
    }
}

/// The verbs of the fast store.
pub(crate) struct FastScripts {
    pub(crate) get: Script,
    pub(crate) put: Script,
    pub(crate) remove: Script,
}

impl FastScripts {
    pub(crate) fn new() -> Self {
        Self {
            get: script!("fast", "fast_get"),
            put: script!("fast", "fast_put"),
            remove: script!("fast", "fast_remove"),
        }
    }
}

/// An argument of a script.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Number(i64),
    Bytes(&'a [u8]),
}

impl From<bool> for Arg<'_> {
    fn from(value: bool) -> Self {
        Self::Number(i64::from(value))
    }
}

/// One call: a script on the one key that it touches.
pub(crate) struct Call<'a> {
    pub(crate) script: &'a Script,
    pub(crate) key: &'a [u8],
    pub(crate) args: &'a [Arg<'a>],
    /// How many replicas are awaited, and for how many milliseconds.
    pub(crate) replicas: Option<(u32, u64)>,
}

impl Call<'_> {
    /// The call of a script that the server knows.
    pub(crate) fn by_hash(&self) -> Cmd {
        self.command("EVALSHA", &self.script.hash)
    }

    /// The call that also makes the script known.
    pub(crate) fn by_source(&self) -> Cmd {
        self.command("EVAL", self.script.source)
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(1).arg(self.key);
        for arg in self.args {
            match arg {
                Arg::Number(number) => command.arg(number),
                Arg::Bytes(bytes) => command.arg(*bytes),
            };
        }
        command
    }
}

/// Asks how many replicas have all that was written before.
pub(crate) fn wait(replicas: u32, patience_ms: u64) -> Cmd {
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(patience_ms);
    wait
}
