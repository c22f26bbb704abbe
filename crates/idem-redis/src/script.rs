//! The Lua scripts, and the commands of one exchange.

use redis::Cmd;

/// A script and its digest, by which `EVALSHA` names it.
pub(crate) struct Script {
    source: &'static str,
    hash: String,
}

impl Script {
    fn new(source: &'static str) -> Self {
        Self { source, hash: redis::Script::new(source).get_hash().to_owned() }
    }
}

/// The scripts of the record store. They decide nothing: `machine` does.
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

/// The scripts of the fast store, one for each verb.
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

/// One exchange about one key. All of it may be sent again.
pub(crate) struct Exchange<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) question: Question<'a>,
    /// How many replicas are awaited, and for how many milliseconds.
    pub(crate) replicas: Option<(u32, u64)>,
}

/// A script, or commands that need none.
pub(crate) enum Question<'a> {
    Script(&'a Script, &'a [Arg<'a>]),
    /// The command at the index `writing` may write.
    Commands {
        all: &'a [Cmd],
        writing: usize,
    },
}

impl Exchange<'_> {
    /// The commands, with the script's digest (`EVALSHA`).
    pub(crate) fn by_hash(&self) -> Vec<Cmd> {
        self.commands(|script| ("EVALSHA", &script.hash))
    }

    /// The commands, with the script's source (`EVAL`), which the server then caches.
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

/// Waits for replicas, and asks how many of them have all earlier writes.
fn wait(replicas: u32, patience_ms: u64) -> Cmd {
    let mut wait = redis::cmd("WAIT");
    wait.arg(replicas).arg(patience_ms);
    wait
}
