//! `idem erase`.

use std::collections::HashSet;
use std::error::Error;
use std::ops::ControlFlow;

use clap::Args;
use idem_core::{
    Erase, EraseOutcome, Inspection, OwnerToken, RecordFilter, RecordId, RecordSummary, StoreErrorKind, erase, machine,
};
use serde_json::json;

use crate::commands::confirm::{confirmed, expect_reason};
use crate::commands::scan::scan;
use crate::output::{row, say, say_json, token};
use crate::store::{Copies, Store};
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
    /// The application has no Redis in front of this store, so there are no copies to erase.
    #[arg(long)]
    no_front: bool,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
    /// Shows the records and what would happen, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

/// How often an erasure is tried whose answer is lost. It may be repeated, because its action stays the same.
const TRIES: u32 = 3;

/// What an erasure would do.
struct Plan {
    erasable: Vec<Erase>,
    /// Records that would not be erased, or cannot be read.
    left: u64,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    expect_reason(&options.reason)?;
    if let Some(principal) = &options.principal {
        if principal.is_empty() {
            return Err("--principal is empty".into());
        }
        unnamed(options, principal)?;
    }
    if json && !options.yes && !options.dry_run {
        return Err("--json does not ask: give --yes, or --dry-run".into());
    }
    expect_front(store, options)?;
    let Some(plan) = plan(store, options, json).await? else {
        eprintln!("there is no such record; an expired one goes with the purge");
        return Ok(Ended::Unchanged);
    };
    let Plan { erasable, mut left } = plan;
    if options.dry_run {
        if !json {
            say(&format!("{} would be erased, {left} not; nothing was changed: --dry-run", erasable.len()));
        }
        return Ok(if left == 0 { Ended::Done } else { Ended::Unchanged });
    }
    if !erasable.is_empty() && !options.yes && !confirmed("give --yes")? {
        eprintln!("nothing was changed");
        return Ok(Ended::Unchanged);
    }
    let mut done = 0;
    for request in &erasable {
        let outcome = erased(store, request, options).await.inspect_err(|_| {
            eprintln!("{done} records were erased before this error, {left} were left, and the others were not tried");
        })?;
        match outcome {
            EraseOutcome::Erased => done += 1,
            _ => left += 1,
        }
        report(&request.id, outcome, json);
    }
    if !json {
        say(&format!("{done} erased, {left} not"));
    }
    for line in copies_lines(store, done) {
        if json { eprintln!("{line}") } else { say(&line) }
    }
    Ok(if left == 0 { Ended::Done } else { Ended::Unchanged })
}

/// Refuses to leave a copy in Redis unnoticed: a durable store does not know whether there is one in front of it.
fn expect_front(store: &dyn Store, options: &Options) -> Result<(), Box<dyn Error>> {
    match store.copies() {
        #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
        Copies::NotKnown if !options.no_front && !options.dry_run => {
            Err("the application may keep copies of these answers in Redis, by idem-hybrid, and they would stay readable: give \
                 --front URL and its --key-prefix, or --no-front if there is none"
                .into())
        }
        Copies::InFront { .. } if options.no_front => {
            Err("--no-front contradicts --front (or IDEM_FRONT): give one of them".into())
        }
        _ => Ok(()),
    }
}

/// What has become of copies of so many erased records.
fn copies_lines(store: &dyn Store, done: u64) -> Vec<String> {
    match store.copies() {
        _ if done == 0 => Vec::new(),
        Copies::None => Vec::new(),
        #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
        Copies::NotKnown => {
            vec!["not erased: copies in a Redis in front of the store, if there is one (--no-front)".to_owned()]
        }
        Copies::InFront { erased } => {
            let mut lines =
                vec![format!("{erased} of {done} records had a copy in the Redis of --front; it is erased")];
            if erased == 0 {
                lines.push(
                    "not erased: copies in another Redis, or under another --key-prefix; compare both with the application"
                        .to_owned(),
                );
            }
            lines
        }
    }
}

/// Shows the selected records, and what would happen to each. `None` if there are none.
async fn plan(store: &dyn Store, options: &Options, json: bool) -> Result<Option<Plan>, Box<dyn Error>> {
    let (ids, unreadable) = selected(store, options).await?;
    let mut plan = Plan { erasable: Vec::new(), left: unreadable };
    for id in ids {
        // An erasure needs no key, so a record that does not open is erased too.
        let inspected = store.encrypted().map_or(store, |encrypted| &**encrypted.inner()).inspect(&id).await;
        match inspected {
            Ok(inspection) => plan.add(id, &inspection, options, json)?,
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                let text = format!("it cannot be read, and is not erased: {}", with_causes(&error));
                match json {
                    true => say_json(&json!({ "id": id.to_string(), "erased": false, "text": text })),
                    false => say(&format!("{id}  {text}")),
                }
                plan.left += 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(plan).filter(|plan| !plan.erasable.is_empty() || plan.left > 0))
}

/// The ids of the selected records, and how many others cannot be read. A record that is made meanwhile may be missed.
async fn selected(store: &dyn Store, options: &Options) -> Result<(Vec<RecordId>, u64), Box<dyn Error>> {
    if let Some(id) = options.id {
        return Ok((vec![id], 0));
    }
    let (principal, namespace) = (options.principal.clone(), options.namespace.clone());
    let filter = RecordFilter { principal, namespace, ..RecordFilter::default() };
    let (mut ids, mut known, mut begun) = (Vec::new(), HashSet::new(), None);
    // On Postgres a record that changes meanwhile may move to where the scan has been. So it ends when another scan finds nothing
    // new, of what was there at the beginning.
    let scanned = loop {
        let before = ids.len();
        let scanned = scan(store, &filter, async |_, page| {
            let begun = *begun.get_or_insert(page.now);
            let old = page.records.iter().filter(|record| record.created_at <= begun);
            ids.extend(old.map(|record| record.id).filter(|id| known.insert(*id)));
            Ok(ControlFlow::Continue(()))
        })
        .await?;
        if ids.len() == before {
            break scanned;
        }
    };
    if scanned.unreadable > 0 {
        eprintln!(
            "{} records cannot be read, and may be of this principal; they are not erased. The log names their ids",
            scanned.unreadable
        );
    }
    Ok((ids, scanned.unreadable))
}

impl Plan {
    /// Shows a record, and says what an erasure would do. A record that is gone does not count.
    fn add(
        &mut self,
        id: RecordId,
        inspection: &Inspection,
        options: &Options,
        json: bool,
    ) -> Result<(), Box<dyn Error>> {
        let Some(record) = &inspection.record else { return Ok(()) };
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
        if outcome == EraseOutcome::Erased {
            self.erasable.push(request);
            if json && options.dry_run {
                say_json(&json!({ "id": id.to_string(), "erased": false, "text": "it would be erased" }));
            }
        } else {
            self.left += 1;
            report(&id, outcome, json);
        }
        Ok(())
    }
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
