//! `idem resolve`.

use std::error::Error;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use idem_core::{
    HeaderField, OwnerToken, RecordVersion, Refusal, Resolution, Resolve, ResolveOutcome, StateName, StoredBody,
    StoredResponse, machine, repair,
};
use serde_json::json;

use crate::commands::show::{Which, answer_lines, explained, without_record};
use crate::output::{say, say_json, token};
use crate::store::Store;
use crate::{Ended, with_causes};

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
    /// The status of the answer that repeats get: 200 to 599 for --as completed, 400 to 599 for failed and retryable. With retryable
    /// they get it when the attempts are used up.
    #[arg(long, value_name = "STATUS")]
    status: Option<u16>,
    /// A header field of that answer, as in "content-type: application/json". May be repeated.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// A file with the body of that answer. Default: an empty body.
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,
    /// With --as retryable: how long until it may run again.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    retry_after: Option<Duration>,
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
    fn state(self) -> StateName {
        match self {
            Self::Completed => StateName::Completed,
            Self::Failed => StateName::Failed,
            Self::Retryable => StateName::Retryable,
            Self::Unknown => StateName::OutcomeUnknown,
        }
    }

    fn sentence(self) -> &'static str {
        match self {
            Self::Completed => "it took effect, and repeats get the answer",
            Self::Failed => "it took no effect and never runs again, and repeats get the answer",
            Self::Retryable => "it took no effect, and the next request with its key runs it again",
            Self::Unknown => "it is not known whether it took effect, and repeats get 504",
        }
    }
}

/// How often a repair is tried whose answer is lost. It may be repeated, because its action stays the same.
const TRIES: u32 = 3;

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    if options.reason.trim().is_empty() {
        return Err("--reason is empty: say why, for those who look at this record later".into());
    }
    if json && !options.yes && !options.dry_run {
        return Err("--json does not ask: give --yes, and --seen with the version that you have looked at".into());
    }
    let resolution = options.resolution()?;
    let id = options.which.id()?;
    let inspection = store.inspect(&id).await?;
    let Some(record) = &inspection.record else {
        without_record(id, &inspection, json);
        return Ok(Ended::Unchanged);
    };
    let seen = options.seen.unwrap_or_else(|| record.version());
    let request = Resolve { id, action: OwnerToken::random(), seen, resolution, retention: options.retention };
    if !json {
        say(&explained(id, record, &inspection, false));
        say(&format!("\nTo be resolved: {}.", options.how.sentence()));
        if let Some(response) = options.response()? {
            answer_lines(&response, true).iter().for_each(|line| say(line));
        }
    }
    let outcome = if options.dry_run {
        match inspection.runs_in_transaction {
            true => ResolveOutcome::Refused(Refusal::Live),
            false => machine::resolve(Some(record), &request, inspection.now).1,
        }
    } else {
        if !options.yes && !confirmed()? {
            eprintln!("nothing was changed");
            return Ok(Ended::Unchanged);
        }
        repaired(store, &request, options).await?
    };
    let text = match outcome {
        ResolveOutcome::Resolved if options.dry_run => "it would be resolved; nothing was changed: --dry-run",
        outcome => outcome.meaning(),
    };
    if json {
        let is_resolved = outcome == ResolveOutcome::Resolved && !options.dry_run;
        say_json(&json!({ "id": id.to_string(), "resolved": is_resolved, "text": text }));
    } else {
        say(text);
    }
    Ok(if outcome == ResolveOutcome::Resolved { Ended::Done } else { Ended::Unchanged })
}

async fn repaired(store: &dyn Store, request: &Resolve, options: &Options) -> Result<ResolveOutcome, Box<dyn Error>> {
    let mut left = TRIES;
    loop {
        left -= 1;
        match repair(store, request, &options.actor, &options.reason).await {
            Err(error) if error.is_indeterminate() && left > 0 => {}
            Err(error) if error.is_indeterminate() => {
                let action = token(&request.action);
                let message = format!(
                    "it is not known whether the record was resolved. If so, `idem show` names the owner {action}"
                );
                return Err(format!("{message}: {}", with_causes(&error)).into());
            }
            outcome => return Ok(outcome?),
        }
    }
}

/// Asks on the terminal.
fn confirmed() -> Result<bool, Box<dyn Error>> {
    if !std::io::stdin().is_terminal() {
        return Err(
            "there is no terminal to ask on: give --yes, and --seen with the version that you have looked at".into()
        );
    }
    eprint!("Type yes to go on: ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

impl Options {
    fn resolution(&self) -> Result<Resolution, Box<dyn Error>> {
        Ok(Resolution::new(self.how.state(), self.response()?, self.retry_after)?)
    }

    /// The answer that repeats get; `None` without a status.
    fn response(&self) -> Result<Option<StoredResponse>, Box<dyn Error>> {
        let Some(status) = self.status else {
            if !self.headers.is_empty() || self.body_file.is_some() {
                return Err("give --status: the status of the answer that repeats get".into());
            }
            return Ok(None);
        };
        let body = match &self.body_file {
            Some(file) => std::fs::read(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?,
            None => Vec::new(),
        };
        let field = |text: &String| {
            let (name, value) = text.split_once(':')?;
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            let is_field =
                !name.is_empty() && name.bytes().all(is_token) && !value.bytes().any(|byte| byte < b' ' || byte == 127);
            is_field
                .then(|| HeaderField { name: name.to_ascii_lowercase().into(), value: value.trim().to_owned().into() })
        };
        let headers: Option<Vec<_>> = self.headers.iter().map(field).collect();
        let headers = headers.ok_or("a header field must have the form `name: value`")?.into();
        Ok(Some(StoredResponse { status, headers, body: StoredBody::Retained(body.into()), trace: None }))
    }
}
