//! `idem erase`.

use std::error::Error;

use clap::Args;
use idem_core::{Erase, EraseOutcome, OwnerToken, PartSize, RecordFilter, RecordId, RecordSummary, erase, machine};
use serde_json::json;

use crate::commands::confirm::confirmed;
use crate::output::{Progress, row, say, say_json, token};
use crate::store::Store;
use crate::{Ended, with_causes};

/// What to erase, and why.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The id of one record, in 64 hexadecimal digits, in place of a principal.
    #[arg(required_unless_present = "principal")]
    id: Option<RecordId>,
    /// All records of this principal. With an id: the text that notes of earlier repairs must not name.
    #[arg(long)]
    principal: Option<String>,
    /// Only records of this namespace.
    #[arg(long, conflicts_with = "id")]
    namespace: Option<String>,
    /// Why. It stays in the store, so it must not name the person.
    #[arg(long)]
    reason: String,
    /// Who erases it. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
    /// Shows the records and what would happen, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

/// How often an erasure is tried whose answer is lost. It may be repeated, because its action stays the same.
const TRIES: u32 = 3;

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    if options.reason.trim().is_empty() {
        return Err("--reason is empty: say why, for those who look at this record later".into());
    }
    if let Some(principal) = &options.principal {
        if principal.is_empty() {
            return Err("--principal is empty".into());
        }
        unnamed(options, principal)?;
    }
    if json && !options.yes && !options.dry_run {
        return Err("--json does not ask: give --yes, or --dry-run".into());
    }
    let mut planned = Vec::new();
    for id in selected(store, options).await? {
        planned.extend(plan(store, id, options, json).await?);
    }
    let erasable = planned.iter().filter(|(_, outcome)| *outcome == EraseOutcome::Erased).count();
    let mut left = planned.len() - erasable;
    if planned.is_empty() {
        eprintln!("there is no such record; an expired one goes with the purge");
        return Ok(Ended::Unchanged);
    }
    if options.dry_run {
        if !json {
            say(&format!("{erasable} would be erased, {left} not; nothing was changed: --dry-run"));
        }
        return Ok(if left == 0 { Ended::Done } else { Ended::Unchanged });
    }
    if erasable > 0 && !options.yes && !confirmed("give --yes")? {
        eprintln!("nothing was changed");
        return Ok(Ended::Unchanged);
    }
    for (request, outcome) in planned.iter().filter(|(_, outcome)| *outcome == EraseOutcome::Erased) {
        let outcome = match erased(store, request, options).await? {
            EraseOutcome::Erased => *outcome,
            other => {
                left += 1;
                other
            }
        };
        report(&request.id, outcome, json);
    }
    if !json {
        say(&format!("{} erased, {left} not", planned.len() - left));
    }
    Ok(if left == 0 { Ended::Done } else { Ended::Unchanged })
}

/// The ids of the selected records. A record that is made meanwhile may be missed.
async fn selected(store: &dyn Store, options: &Options) -> Result<Vec<RecordId>, Box<dyn Error>> {
    if let Some(id) = options.id {
        return Ok(vec![id]);
    }
    let (principal, namespace) = (options.principal.clone(), options.namespace.clone());
    let filter = RecordFilter { principal, namespace, ..RecordFilter::default() };
    let (mut ids, mut from, mut part, mut scanned, mut unreadable) = (Vec::new(), None, PartSize::new(), 0, 0);
    let progress = Progress::start("reading records");
    loop {
        let page = match store.list(&filter, from.as_ref(), part.get()).await {
            Ok(page) => page,
            Err(error) => {
                part.shrink(error)?;
                continue;
            }
        };
        scanned += page.scanned;
        unreadable += page.unreadable;
        progress.show(scanned, page.progress);
        ids.extend(page.records.iter().map(|record| record.id));
        match page.next {
            Some(next) => from = Some(next),
            None => break,
        }
    }
    progress.end();
    if unreadable > 0 {
        return Err(
            format!("{unreadable} records cannot be read, and may be of this principal; nothing was changed").into()
        );
    }
    Ok(ids)
}

/// Shows a record, and says what an erasure would do. `None` if the record is gone.
async fn plan(
    store: &dyn Store,
    id: RecordId,
    options: &Options,
    json: bool,
) -> Result<Option<(Erase, EraseOutcome)>, Box<dyn Error>> {
    let inspection = store.inspect(&id).await?;
    let Some(record) = &inspection.record else { return Ok(None) };
    let kept = inspection.origin.as_ref().and_then(|origin| origin.scope.principal());
    // By its id, a record can be of any person. It has none any more if it was erased before.
    let principal = options.principal.as_deref().or(kept.filter(|principal| !principal.is_empty()));
    if let Some(principal) = principal {
        unnamed(options, principal)?;
    }
    let principal = principal.map(Into::into);
    let request = Erase { id, action: OwnerToken::random(), seen: record.version(), principal };
    let outcome = match inspection.runs_in_transaction {
        true => EraseOutcome::Live,
        false => machine::erase(Some(record), &request, inspection.now).1,
    };
    if !json {
        say(&row(&RecordSummary::new(id, inspection.origin.clone(), record), inspection.now));
    }
    if outcome != EraseOutcome::Erased {
        report(&id, outcome, json);
    } else if json && options.dry_run {
        say_json(&json!({ "id": id.to_string(), "erased": false, "text": "it would be erased" }));
    }
    Ok(Some((request, outcome)))
}

/// Refuses a reason that names the person: it stays.
fn unnamed(options: &Options, principal: &str) -> Result<(), Box<dyn Error>> {
    match options.reason.contains(principal) {
        true => Err("--reason names the principal: the reason stays, so write it without the person".into()),
        false => Ok(()),
    }
}

fn report(id: &RecordId, outcome: EraseOutcome, json: bool) {
    let (is_erased, text) = (outcome == EraseOutcome::Erased, outcome.meaning());
    match json {
        true => say_json(&json!({ "id": id.to_string(), "erased": is_erased, "text": text })),
        false if is_erased => {}
        false => say(&format!("  {text}")),
    }
}

async fn erased(store: &dyn Store, request: &Erase, options: &Options) -> Result<EraseOutcome, Box<dyn Error>> {
    let mut left = TRIES;
    loop {
        left -= 1;
        match erase(store, request, &options.actor, &options.reason).await {
            Err(error) if error.is_indeterminate() && left > 0 => {}
            Err(error) if error.is_indeterminate() => {
                let message = format!("it is not known whether {} was erased", request.id);
                let advice = format!("if so, `idem show` names the owner {}", token(&request.action));
                return Err(format!("{message}; {advice}: {}", with_causes(&error)).into());
            }
            outcome => return Ok(outcome?),
        }
    }
}
