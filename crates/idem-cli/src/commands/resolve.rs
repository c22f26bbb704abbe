//! `idem resolve`.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use idem_core::{
    HeaderField, OwnerToken, RecordVersion, Refusal, Resolution, Resolve, ResolveOutcome, StateName, StoredBody,
    StoredResponse, machine, repair,
};
use serde_json::json;

use crate::commands::confirm::{confirmed, expect_reason};
use crate::commands::sealed;
use crate::commands::show::{Which, answer_lines, explained, inspected, without_record};
use crate::output::{say, say_json, token};
use crate::store::Store;
use crate::{Ended, with_causes};

/// Header fields about a connection. With the length of another body, the next answer on the connection could not be found.
const OF_CONNECTION: [&str; 8] =
    ["connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"];

/// What to say of which record.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How the operation ended.
    #[arg(long = "as", value_enum)]
    how: How,
    /// With --as retryable: how long until it may run again.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    retry_after: Option<Duration>,
    #[command(flatten)]
    answer: Answer,
    #[command(flatten)]
    action: Action,
}

/// `resolve --as retryable`.
#[derive(Debug, Args)]
pub(crate) struct Release {
    /// How long until it may run again.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    retry_after: Option<Duration>,
    /// The status that repeats get when the attempts are used up: 400 to 599.
    #[arg(long, value_name = "STATUS", default_value_t = 503)]
    status: u16,
    #[command(flatten)]
    action: Action,
}

/// `resolve --as completed` or `failed`.
#[derive(Debug, Args)]
pub(crate) struct Settle {
    /// How the operation ended.
    #[arg(long = "as", value_enum)]
    how: Final,
    #[command(flatten)]
    answer: Answer,
    #[command(flatten)]
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Final {
    /// It took effect; repeats get the answer.
    Completed,
    /// It took no effect and never runs again; repeats get the answer.
    Failed,
}

impl From<Release> for Options {
    fn from(release: Release) -> Self {
        let Release { retry_after, status, action } = release;
        let answer = Answer { status: Some(status), headers: Vec::new(), body_file: None };
        Self { how: How::Retryable, retry_after, answer, action }
    }
}

impl From<Settle> for Options {
    fn from(settle: Settle) -> Self {
        let Settle { how, answer, action } = settle;
        let how = match how {
            Final::Completed => How::Completed,
            Final::Failed => How::Failed,
        };
        Self { how, retry_after: None, answer, action }
    }
}

/// Which record, why, and how it is done.
#[derive(Debug, Args)]
struct Action {
    #[command(flatten)]
    which: Which,
    /// Why. It stays in the store.
    #[arg(long)]
    reason: String,
    /// Who resolves it. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
    /// The version of the record that you have looked at, as `idem show` says it. If the record has changed since, nothing happens.
    #[arg(long, value_name = "VERSION")]
    seen: Option<RecordVersion>,
    /// How long the record is kept from now; not for less than before.
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = humantime::parse_duration)]
    retention: Duration,
    /// Does not ask. Needs --seen.
    #[arg(long, requires = "seen")]
    yes: bool,
    /// Shows the record and what would happen, and changes nothing.
    #[arg(long)]
    dry_run: bool,
    /// With --keys: seals the answer although no record proves that the primary key is that of the application.
    #[arg(long)]
    dangerous_unverified_key: bool,
}

/// The answer that repeats get.
#[derive(Debug, Args)]
struct Answer {
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
            Self::Retryable => {
                "it took no effect; the next request with its key runs it again, unless its attempts are used up"
            }
            Self::Unknown => "it is not known whether it took effect, and repeats get 504",
        }
    }
}

/// How often a repair is tried whose answer is lost. It may be repeated, because its action stays the same.
const TRIES: u32 = 3;

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let action = &options.action;
    expect_reason(&action.reason)?;
    if json && !action.yes && !action.dry_run {
        return Err("--json does not ask: give --yes, and --seen with the version that you have looked at".into());
    }
    // A file is read once: what is shown is what is stored.
    let response = options.answer.response()?;
    let resolution = Resolution::new(options.how.state(), response.clone(), options.retry_after)?;
    let id = action.which.id()?;
    let (inspection, _) = inspected(store, &id).await?;
    let Some(record) = &inspection.record else {
        without_record(&action.which, id, &inspection, json);
        return Ok(Ended::Unchanged);
    };
    if resolution != Resolution::OutcomeUnknown {
        sealed::expect_readable(store, Some(id), action.dangerous_unverified_key).await?;
    }
    let seen = action.seen.unwrap_or_else(|| record.version());
    let request = Resolve { id, action: OwnerToken::random(), seen, resolution, retention: action.retention };
    if !json {
        say(&explained(id, record, &inspection, false));
        say(&format!("\nTo be resolved: {}.", options.how.sentence()));
        if let Some(response) = &response {
            answer_lines(response, true).iter().for_each(|line| say(line));
        }
    }
    let outcome = if action.dry_run {
        match inspection.runs_in_transaction {
            true => ResolveOutcome::Refused(Refusal::Live),
            false => machine::resolve(Some(record), &request, inspection.now).1,
        }
    } else {
        if !action.yes && !confirmed("give --yes, and --seen with the version that you have looked at")? {
            eprintln!("nothing was changed");
            return Ok(Ended::Unchanged);
        }
        repaired(store, &request, action).await?
    };
    let text = match outcome {
        ResolveOutcome::Resolved if action.dry_run => "it would be resolved; nothing was changed: --dry-run",
        outcome => outcome.meaning(),
    };
    if json {
        let is_resolved = outcome == ResolveOutcome::Resolved && !action.dry_run;
        say_json(&json!({ "id": id.to_string(), "resolved": is_resolved, "text": text }));
    } else {
        say(text);
    }
    Ok(if outcome == ResolveOutcome::Resolved { Ended::Done } else { Ended::Unchanged })
}

async fn repaired(store: &dyn Store, request: &Resolve, action: &Action) -> Result<ResolveOutcome, Box<dyn Error>> {
    let mut left = TRIES;
    loop {
        left -= 1;
        match repair(store, request, &action.actor, &action.reason).await {
            Err(error) if error.is_indeterminate() && left > 0 => {}
            Err(error) if error.is_indeterminate() => {
                let owner = token(&request.action);
                let message = format!(
                    "it is not known whether the record was resolved. If so, `idem show` names the owner {owner}"
                );
                return Err(format!("{message}: {}", with_causes(&error)).into());
            }
            outcome => return Ok(outcome?),
        }
    }
}

impl Answer {
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
        let headers: Vec<HeaderField> = headers.ok_or("a header field must have the form `name: value`")?;
        let of_connection = |field: &&HeaderField| OF_CONNECTION.iter().any(|name| *field.name == *name.as_bytes());
        if let Some(field) = headers.iter().find(of_connection) {
            let name = String::from_utf8_lossy(&field.name);
            return Err(format!(
                "leave out the header field `{name}`: it describes a connection, and each repeat has its own"
            )
            .into());
        }
        let headers = headers.into();
        Ok(Some(StoredResponse { status, headers, body: StoredBody::Retained(body.into()), trace: None }))
    }
}
