//! The scripts, and what is asked of the server that has a record.

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

/// Those of the record store. They decide nothing: `machine` does.
pub(crate) struct Scripts {
    pub(crate) look: Script,
    pub(crate) replace: Script,
    pub(crate) settle: Script,
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            look: Script::new(include_str!("../lua/look.lua")),
            replace: Script::new(include_str!("../lua/replace.lua")),
            settle: Script::new(include_str!("../lua/settle.lua")),
        }
    }
}

/// The verbs of the fast store.
pub(crate) struct FastScripts {
    pub(crate) get: Script,
    pub(crate) put: Script,
    pub(crate) remove: Script,
}

macro_rules! fast_script {
    ($name:literal) => {
        Script::new(concat!(include_str!("../lua/fast.lua"), include_str!(concat!("../lua/", $name, ".lua"))))
    };
}

impl FastScripts {
    pub(crate) fn new() -> Self {
        Self { get: fast_script!("fast_get"), put: fast_script!("fast_put"), remove: fast_script!("fast_remove") }
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

/// What is asked in one exchange about the one key that it touches. All of it may be sent again.
pub(crate) struct Exchange<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) question: Question<'a>,
    /// How many replicas are awaited, and for how many milliseconds.
    pub(crate) replicas: Option<(u32, u64)>,
}

/// A script, or commands that need none.
pub(crate) enum Question<'a> {
    Script(&'a Script, &'a [Arg<'a>]),
    /// One of them, by its place, may write.
    Commands {
        all: &'a [Cmd],
        writing: usize,
    },
}

impl Exchange<'_> {
    /// With the script by the name under which the server knows it.
    pub(crate) fn by_hash(&self) -> Vec<Cmd> {
        self.commands(|script| ("EVALSHA", &script.hash))
    }

    /// With the script itself, which also makes it known.
    pub(crate) fn by_source(&self) -> Vec<Cmd> {
        self.commands(|script| ("EVAL", script.source))
    }

    fn commands<'s>(&'s self, named: impl Fn(&'s Script) -> (&'static str, &'s str)) -> Vec<Cmd> {
        let mut commands = match self.question {
            Question::Commands { all: commands, .. } => {
                let mut all = Vec::with_capacity(commands.len() + 1);
                all.extend_from_slice(commands);
                all
            }
            Question::Script(script, args) => {
                let (name, script) = named(script);
                let length = |arg: &Arg<'_>| match arg {
                    Arg::Number(_) => 20,
                    Arg::Bytes(bytes) => bytes.len(),
                };
                let lengths: usize = args.iter().map(length).sum();
                let mut command = Cmd::with_capacity(4 + args.len(), 8 + script.len() + self.key.len() + lengths);
                command.arg(name);
                command.arg(script).arg(1).arg(self.key);
                for arg in args {
                    match arg {
                        Arg::Number(number) => command.arg(number),
                        Arg::Bytes(bytes) => command.arg(*bytes),
                    };
                }
                vec![command]
            }
        };
        commands.extend(self.replicas.map(|(replicas, patience_ms)| wait(replicas, patience_ms)));
        commands
    }
}

/// Asks how many replicas have all that was written before.
fn wait(replicas: u32, patience_ms: u64) -> Cmd {
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(patience_ms);
    wait
}
