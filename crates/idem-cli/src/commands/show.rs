//! `idem show`.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Args;
use idem_core::{
    Inspection, Record, RecordId, RecordIdentity, RecordState, RecordSummary, Scope, State, StoreError, StoreErrorKind,
    StoredBody, StoredResponse, Timestamp,
};
use serde_json::{Value, json};

use crate::output::{printable, say, say_json, summary_json, token};
use crate::store::Store;
use crate::{Ended, with_causes};

/// Which record.
#[derive(Debug, Clone, Args)]
pub(crate) struct Which {
    /// The id of the record, in 64 hexadecimal digits.
    #[arg(required_unless_present = "key", conflicts_with = "key")]
    id: Option<String>,
    /// The idempotency key that the client sent, with or without the quotes of the header field. Give --namespace, --operation and
    /// --principal as the application has them.
    #[arg(long, requires = "operation")]
    key: Option<String>,
    /// The namespace of the application.
    #[arg(long, default_value = "", hide_default_value = true, conflicts_with = "id")]
    namespace: String,
    /// The tenant that owns the key; leave it out if there is a single one.
    #[arg(long, conflicts_with = "id")]
    principal: Option<String>,
    /// What the key protects, such as "POST /v1/payments".
    #[arg(long, conflicts_with = "id")]
    operation: Option<String>,
    /// A file with the secret of the record ids, if the application has one.
    #[arg(long, value_name = "FILE", conflicts_with = "id")]
    secret_file: Option<PathBuf>,
}

impl Which {
    pub(crate) fn id(&self) -> Result<RecordId, Box<dyn Error>> {
        if let Some(id) = &self.id {
            return Ok(id.parse()?);
        }
        let key = unquoted(self.key.as_deref().unwrap_or_default()).parse()?;
        let operation = self.operation.clone().unwrap_or_default();
        let scope = match &self.principal {
            Some(principal) => Scope::new(principal.clone(), operation),
            None => Scope::single_tenant(operation),
        };
        let identity = identity(&self.namespace, self.secret_file.as_deref())?;
        Ok(identity.record_id(&scope, &key))
    }
}

/// A key without the quotes that RFC 8941 gives it in a header field.
fn unquoted(key: &str) -> String {
    let Some(inside) = key.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else { return key.to_owned() };
    let (mut text, mut letters) = (String::with_capacity(inside.len()), inside.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => text.extend(letters.next()),
            '"' => return key.to_owned(),
            letter => text.push(letter),
        }
    }
    text
}

/// The ids of the records of an application, which may have a secret in a file.
pub(crate) fn identity(namespace: &str, secret_file: Option<&Path>) -> Result<RecordIdentity, Box<dyn Error>> {
    let Some(file) = secret_file else { return Ok(RecordIdentity::new(namespace)) };
    let secret = std::fs::read(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
    if secret.ends_with(b"\n") {
        eprintln!("the secret of {} ends with a line break, which counts", file.display());
    }
    Ok(RecordIdentity::with_secret(namespace, &secret)?)
}

/// Looks at a record, and says whether it opens. If it does not open with the keys of --keys, it is as it is stored: its state can
/// still be resolved.
pub(crate) async fn inspected(store: &dyn Store, id: &RecordId) -> Result<(Inspection, bool), StoreError> {
    match (store.inspect(id).await, store.encrypted()) {
        (Err(error), Some(encrypted)) if error.kind() == StoreErrorKind::Corrupt => {
            let inspection = encrypted.inner().inspect(id).await?;
            eprintln!("its answer or its checkpoint does not open, and is not shown: {}", with_causes(&error));
            Ok((inspection, false))
        }
        (inspection, _) => Ok((inspection?, true)),
    }
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
    let (inspection, opens) = inspected(store, &id).await?;
    let Some(record) = &inspection.record else {
        return Ok(without_record(&options.which, id, &inspection, json));
    };
    let is_shown = options.answer && opens;
    if json {
        let mut shown = summary_json(&RecordSummary::new(id, inspection.origin.clone(), record), inspection.now);
        shown["owner"] = token(&record.owner).into();
        shown["runs_in_transaction"] = inspection.runs_in_transaction.into();
        shown["opens"] = opens.into();
        shown["answer"] = response_of(record).map_or(Value::Null, |response| answer_json(response, is_shown));
        say_json(&shown);
    } else {
        say(&explained(id, record, &inspection, is_shown));
    }
    Ok(Ended::Done)
}

/// Says that there is no record, or none yet.
pub(crate) fn without_record(which: &Which, id: RecordId, inspection: &Inspection, json: bool) -> Ended {
    if !inspection.runs_in_transaction {
        eprintln!("{}", inspection.meaning());
        if which.id.is_none() {
            eprintln!(
                "The id {id} was made of this key, namespace, principal, operation and secret: compare each with the application's."
            );
        }
        return Ended::Unchanged;
    }
    if json {
        say_json(&json!({ "id": id.to_string(), "state": null, "runs_in_transaction": true }));
    } else {
        say(inspection.meaning());
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
    lines.extend(deadline(summary.state, now));
    lines.push(format!("attempt     {}", summary.attempt));
    lines.push(format!("owner       {}", token(&record.owner)));
    if let Some(checkpoint) = &record.checkpoint {
        let (sequence, bytes) = (checkpoint.sequence, checkpoint.data.len());
        lines.push(format!("checkpoint  {} ({sequence}, {bytes} bytes)", printable(&checkpoint.name)));
    }
    for (name, time) in [("made", summary.created_at), ("changed", summary.updated_at)] {
        lines.push(format!("{name:<12}{time}, {} ago", now.age_since(time)));
    }
    lines.push(format!("expires     {}, in {}", summary.expires_at, summary.expires_at.age_since(now)));
    if let Some(response) = response_of(record) {
        lines.extend(answer_lines(response, answer));
    }
    lines.push(String::new());
    lines.push(inspection.meaning().to_owned());
    lines.join("\n")
}

/// How long the lease or the wait still lasts, or has been over.
fn deadline(state: RecordState, now: Timestamp) -> Option<String> {
    let (name, until) = match state {
        RecordState::InProgress { lease_until } => ("lease", lease_until),
        RecordState::Retryable { not_before } => ("waits", not_before),
        RecordState::Completed | RecordState::Failed | RecordState::OutcomeUnknown => return None,
    };
    let left = if now < until {
        format!("ends in {}", until.age_since(now))
    } else {
        format!("over for {}", now.age_since(until))
    };
    Some(format!("{name:<12}{left}"))
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
        StoredBody::NotRetained => "not kept".to_owned(),
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
