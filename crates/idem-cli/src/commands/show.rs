//! `idem show`.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use idem_core::{
    Inspection, OwnerToken, Record, RecordId, RecordIdentity, RecordState, RecordSummary, Scope, State, StoredBody,
    StoredResponse, Takeover, Timestamp,
};
use serde_json::{Value, json};

use crate::Ended;
use crate::output::{age, brief, printable, say, say_json, summary_json, token};
use crate::store::Store;

/// Which record.
#[derive(Debug, Clone, Args)]
pub(crate) struct Which {
    /// The id of the record, in 64 hexadecimal digits.
    #[arg(required_unless_present = "key", conflicts_with = "key")]
    id: Option<String>,
    /// The idempotency key that the client sent. Give --namespace, --operation and --principal as well.
    #[arg(long, requires = "operation")]
    key: Option<String>,
    /// The namespace of the application.
    #[arg(long, default_value = "", hide_default_value = true)]
    namespace: String,
    /// The tenant that owns the key; leave it out if there is a single one.
    #[arg(long)]
    principal: Option<String>,
    /// What the key protects, such as "POST /v1/payments".
    #[arg(long)]
    operation: Option<String>,
    /// A file with the secret of the record ids, if the application has one.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

impl Which {
    pub(crate) fn id(&self) -> Result<RecordId, Box<dyn Error>> {
        if let Some(id) = &self.id {
            return parse(id).ok_or_else(|| "the id of a record has 64 hexadecimal digits".into());
        }
        let key = self.key.as_deref().unwrap_or_default().parse()?;
        let operation = self.operation.clone().unwrap_or_default();
        let scope = match &self.principal {
            Some(principal) => Scope::new(principal.clone(), operation),
            None => Scope::single_tenant(operation),
        };
        let identity = match &self.secret_file {
            Some(file) => RecordIdentity::with_secret(self.namespace.clone(), &std::fs::read(file)?)?,
            None => RecordIdentity::new(self.namespace.clone()),
        };
        Ok(identity.record_id(&scope, &key))
    }
}

fn parse(digits: &str) -> Option<RecordId> {
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut id = [0; 32];
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(RecordId::from_bytes(id))
}

/// Which record, and how much of it.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    which: Which,
    /// Shows the header values and the body of the stored answer. They may hold secrets.
    #[arg(long)]
    answer: bool,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let id = options.which.id()?;
    let inspection = store.inspect(&id).await?;
    let Some(record) = &inspection.record else {
        return Ok(without_record(id, &inspection, json));
    };
    if json {
        let mut shown = summary_json(&RecordSummary::new(id, inspection.origin.clone(), record), inspection.now);
        shown["owner"] = token(&record.owner).into();
        shown["runs_in_transaction"] = inspection.runs_in_transaction.into();
        shown["answer"] = response_of(record).map_or(Value::Null, |response| answer_json(response, options.answer));
        say_json(&shown);
    } else {
        say(&explained(id, record, &inspection, options.answer));
    }
    Ok(Ended::Done)
}

/// Says that there is no record, or none yet.
pub(crate) fn without_record(id: RecordId, inspection: &Inspection, json: bool) -> Ended {
    if !inspection.runs_in_transaction {
        eprintln!("there is no record {id}, or its retention is over");
        return Ended::Unchanged;
    }
    if json {
        say_json(&json!({ "id": id.to_string(), "state": null, "runs_in_transaction": true }));
    } else {
        say("no record yet: a transaction runs the operation for the first time");
    }
    Ended::Done
}

/// The evidence on a record: what it says, and what that means.
pub(crate) fn explained(id: RecordId, record: &Record, inspection: &Inspection, answer: bool) -> String {
    let summary = RecordSummary::new(id, inspection.origin.clone(), record);
    let now = inspection.now;
    let mut lines = vec![format!("record      {id}"), format!("version     {}", summary.version)];
    if let Some(origin) = &inspection.origin {
        lines.push(format!("namespace   {}", printable(&origin.namespace)));
        lines.push(format!("principal   {}", printable(origin.scope.principal().unwrap_or("(single tenant)"))));
        lines.push(format!("operation   {}", printable(origin.scope.operation())));
    }
    lines.push(format!("state       {}", summary.state.name()));
    lines.push(format!("attempt     {}", summary.attempt));
    lines.push(format!("owner       {}", token(&record.owner)));
    if let Some(checkpoint) = &record.checkpoint {
        let (sequence, bytes) = (checkpoint.sequence, checkpoint.data.len());
        lines.push(format!("checkpoint  {} ({sequence}, {bytes} bytes)", printable(&checkpoint.name)));
    }
    for (name, time) in [("made", summary.created_at), ("changed", summary.updated_at)] {
        lines.push(format!("{name:<12}{time}, {} ago", age(now, time)));
    }
    lines.push(format!("expires     {}, in {}", summary.expires_at, age(summary.expires_at, now)));
    if let Some(response) = response_of(record) {
        lines.extend(answer_lines(response, answer));
    }
    lines.push(String::new());
    let is_released = record.owner == OwnerToken::NOBODY;
    lines.push(meaning(&summary, is_released, inspection.runs_in_transaction, now));
    lines.join("\n")
}

/// What the state means for the next request, and what an operator can do.
fn meaning(summary: &RecordSummary, is_released: bool, runs_in_transaction: bool, now: Timestamp) -> String {
    if runs_in_transaction {
        return "A transaction runs the operation now. Its record changes when the transaction commits.".to_owned();
    }
    match summary.state {
        RecordState::InProgress { lease_until } if now < lease_until => {
            let left = brief(lease_until.saturating_duration_since(now));
            format!("A process runs the operation, or has crashed less than a lease ago. Its lease ends in {left} unless it is renewed.")
        }
        RecordState::InProgress { lease_until } => {
            let over = age(now, lease_until);
            let next = match summary.takeover {
                Some(Takeover::Rerun) | None => "The next request with this key runs the operation again.",
                Some(Takeover::Unknown) => {
                    "It is not known whether it took effect. The next request with this key gets 504, and so does \
                     every later one. To resolve it: `idem resolve … --as unknown`, look at what happened, and resolve that."
                }
                Some(Takeover::Probe) => "The next request with this key finds out whether it took effect, by its probe.",
            };
            if is_released {
                return format!("A probe of a crashed run was given back {over} ago. {next}");
            }
            format!("Its process has crashed or stalled: the lease has been over for {over}. {next}")
        }
        RecordState::Completed => "It took effect. Every repeat gets this answer.".to_owned(),
        RecordState::Failed => "It failed and never runs again. Every repeat gets this answer.".to_owned(),
        RecordState::OutcomeUnknown => {
            "Its process crashed, and it is not known whether the operation took effect. Every repeat gets 504. Look at what \
             happened, and `idem resolve` it."
                .to_owned()
        }
        RecordState::Retryable { not_before } if now < not_before => {
            let left = brief(not_before.saturating_duration_since(now));
            format!("It failed, and may run again in {left}, when a request with this key comes.")
        }
        RecordState::Retryable { .. } => "It failed, or its owner gave it back. The next request with this key runs it again.".to_owned(),
    }
}

fn response_of(record: &Record) -> Option<&StoredResponse> {
    match &record.state {
        State::InProgress { .. } => None,
        State::Completed { response } | State::Failed { response, .. } => Some(response),
    }
}

/// An answer as lines of text, its header values and body only if `is_shown`.
pub(crate) fn answer_lines(response: &StoredResponse, is_shown: bool) -> Vec<String> {
    let body = match &response.body {
        StoredBody::Retained(body) => format!("{} bytes", body.len()),
        StoredBody::NotRetained => "not kept: it was too large".to_owned(),
    };
    let mut lines = vec![format!("answer      {}, body: {body}", response.status)];
    if let Some(trace) = &response.trace {
        lines.push(format!("trace       {trace}"));
    }
    for field in response.headers.iter() {
        let value = if is_shown { printable(&String::from_utf8_lossy(&field.value)) } else { "…".to_owned() };
        lines.push(format!("            {}: {value}", printable(&String::from_utf8_lossy(&field.name))));
    }
    if let (StoredBody::Retained(body), true) = (&response.body, is_shown) {
        lines.push(printable(&String::from_utf8_lossy(body)));
    }
    lines
}

fn answer_json(response: &StoredResponse, is_shown: bool) -> Value {
    let headers: Vec<Value> = response
        .headers
        .iter()
        .map(|field| {
            let value = is_shown.then(|| String::from_utf8_lossy(&field.value).into_owned());
            json!({ "name": String::from_utf8_lossy(&field.name), "value": value })
        })
        .collect();
    let body = match &response.body {
        StoredBody::Retained(body) if is_shown => Some(String::from_utf8_lossy(body).into_owned()),
        StoredBody::Retained(_) | StoredBody::NotRetained => None,
    };
    let trace = response.trace.as_ref().map(ToString::to_string);
    json!({ "status": response.status, "trace": trace, "headers": headers, "body": body })
}
