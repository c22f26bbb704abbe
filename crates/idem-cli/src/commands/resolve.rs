//! `idem resolve`.

use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use idem_core::{
    HeaderField, OwnerToken, RecordVersion, Refusal, Resolution, Resolve, ResolveOutcome, StoredBody, StoredResponse,
    repair,
};
use serde_json::json;

use crate::Ended;
use crate::commands::show::{Which, explained};
use crate::store::Store;

/// What to say of which record.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    which: Which,
    /// How the operation ended.
    #[arg(long = "as", value_enum)]
    how: How,
    /// Why. It stays in the store.
    #[arg(long)]
    reason: String,
    /// Who resolves it. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
    /// The version of the record that you have looked at, as `idem show` says it. If the record has changed since, nothing happens.
    #[arg(long, value_name = "VERSION")]
    seen: Option<RecordVersion>,
    /// The status of the answer that repeats get.
    #[arg(long, default_value_t = 200)]
    status: u16,
    /// A header field of that answer, as in "content-type: application/json". May be repeated.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// A file with the body of that answer. Default: an empty body.
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,
    /// With --as retryable: how long until it may run again.
    #[arg(long, default_value = "0s", value_name = "TIME", value_parser = humantime::parse_duration)]
    retry_after: Duration,
    /// How long the record is kept from now; not for less than before.
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = humantime::parse_duration)]
    retention: Duration,
    /// Does not ask. Needs --seen.
    #[arg(long, requires = "seen")]
    yes: bool,
    /// Shows the record and what would happen, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum How {
    /// It took effect; repeats get the answer.
    Completed,
    /// It took no effect and never runs again; repeats get the answer.
    Failed,
    /// It took no effect and may run again.
    Retryable,
    /// It is not known. First for an operation whose process has crashed.
    Unknown,
}

impl How {
    fn sentence(self) -> &'static str {
        match self {
            Self::Completed => "it took effect, and repeats get the answer",
            Self::Failed => "it took no effect and never runs again, and repeats get the answer",
            Self::Retryable => "it took no effect, and the next request with its key runs it again",
            Self::Unknown => "it is not known whether it took effect, and repeats are told so",
        }
    }
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    if options.reason.trim().is_empty() {
        return Err("--reason is empty: say why, for those who look at this record later".into());
    }
    let resolution = options.resolution()?;
    let id = options.which.id()?;
    let inspection = store.inspect(&id).await?;
    let Some(record) = &inspection.record else {
        eprintln!("there is no record {id}, or its retention is over");
        return Ok(Ended::Unchanged);
    };
    let version = record.version();
    if !json {
        println!("{}\n", explained(id, record, &inspection, false));
        println!("To be resolved: {}.", options.how.sentence());
    }
    if options.seen.is_some_and(|seen| seen != version) {
        eprintln!("nothing was changed: the record is not the one that you have looked at; look again");
        return Ok(Ended::Unchanged);
    }
    if options.dry_run {
        eprintln!("nothing was changed: --dry-run");
        return Ok(Ended::Done);
    }
    if !options.yes && !confirmed()? {
        eprintln!("nothing was changed");
        return Ok(Ended::Unchanged);
    }
    let request = Resolve { id, action: OwnerToken::random(), seen: version, resolution, retention: options.retention };
    let outcome = repair(store, &request, &options.actor, &options.reason).await?;
    let text = match outcome {
        ResolveOutcome::Resolved => "resolved",
        ResolveOutcome::Changed => "nothing was changed: the record has changed meanwhile; look again",
        ResolveOutcome::Refused(Refusal::Live) => "nothing was changed: a process runs the operation",
        ResolveOutcome::Refused(Refusal::Unfenced) => {
            "nothing was changed: its process may only have stalled. Resolve it with --as unknown first, which keeps that process from \
             settling it; then look at what happened, and resolve that"
        }
        ResolveOutcome::Refused(Refusal::Token) => "nothing was changed: the action is not new",
        ResolveOutcome::Refused(Refusal::Final) => "nothing was changed: the record has its final answer",
    };
    if json {
        println!("{}", json!({ "id": id.to_string(), "resolved": outcome == ResolveOutcome::Resolved, "text": text }));
    } else {
        println!("{text}");
    }
    Ok(if outcome == ResolveOutcome::Resolved { Ended::Done } else { Ended::Unchanged })
}

/// Asks on the terminal.
fn confirmed() -> Result<bool, Box<dyn Error>> {
    if !std::io::stdin().is_terminal() {
        return Err(
            "there is no terminal to ask on: give --yes, and --seen with the version that you have looked at".into()
        );
    }
    print!("Type yes to go on: ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

impl Options {
    fn resolution(&self) -> Result<Resolution, Box<dyn Error>> {
        let response = self.response()?;
        Ok(match self.how {
            How::Completed => Resolution::Completed(response),
            How::Failed => Resolution::FailedTerminal(response),
            How::Retryable => Resolution::FailedRetryable { response, retry_after: self.retry_after },
            How::Unknown => Resolution::OutcomeUnknown,
        })
    }

    fn response(&self) -> Result<StoredResponse, Box<dyn Error>> {
        let body = match &self.body_file {
            Some(file) => std::fs::read(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?,
            None => Vec::new(),
        };
        let field = |text: &String| {
            let (name, value) = text.split_once(':')?;
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            let is_field = !name.is_empty() && name.bytes().all(is_token) && !value.bytes().any(|byte| byte < b' ');
            is_field
                .then(|| HeaderField { name: name.to_ascii_lowercase().into(), value: value.trim().to_owned().into() })
        };
        let headers: Option<Vec<_>> = self.headers.iter().map(field).collect();
        let headers = headers.ok_or("a header field must have the form `name: value`")?.into();
        Ok(StoredResponse { status: self.status, headers, body: StoredBody::Retained(body.into()), trace: None })
    }
}
