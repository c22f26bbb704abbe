//! One record: what it says, what that means, what happened to it, and what can be done.

use std::num::NonZeroU32;
use std::sync::Arc;

use axum::extract::{Path, Query, State as FromState};
use http::StatusCode;
use idem_core::{
    Inspection, Record, RecordId, RecordState, RecordSummary, Repair, State, StateName, StoreError, StoredBody,
    StoredResponse, Timestamp,
};
use maud::{Markup, html};
use serde::Deserialize;

use super::form::{Entered, form};
use super::repairs::outcome;
use super::text::{grouped, token, visible};
use super::{Page, failed, missing, page, state};
use crate::console::Console;
use crate::visit::Visit;

/// Among how many of the last repairs those of a record are looked for.
const MOST_REPAIRS: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

/// How much of a body is shown.
const MOST_BYTES: usize = 64 * 1024;

/// `answer=shown` shows the stored answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    answer: String,
}

pub(crate) async fn get(
    FromState(console): FromState<Console>,
    visit: Visit,
    Path(id): Path<String>,
    Query(wanted): Query<Wanted>,
) -> Page {
    let Ok(id) = id.parse::<RecordId>() else { return missing(&visit) };
    let inspection = match console.inspect.inspect(&id).await {
        Ok(inspection) => inspection,
        // What it belongs to is not known either.
        Err(_) if visit.permissions.tenant.is_some() => return missing(&visit),
        Err(error) => return failed(&visit, &error),
    };
    if !visit.permissions.sees(inspection.origin.as_ref()) {
        return missing(&visit);
    }
    if inspection.record.is_none() && !inspection.runs_in_transaction {
        return missing(&visit);
    }
    let shows_answer = wanted.answer == "shown" && visit.permissions.reads_answers;
    if shows_answer {
        tracing::info!(actor = visit.permissions.actor, record = %id, "a stored answer was shown");
    }
    match content(&console, &visit, id, &inspection, shows_answer, &Entered::default()).await {
        Ok(content) => page(&visit, StatusCode::OK, "Record", &content),
        Err(error) => failed(&visit, &error),
    }
}

/// What is known of a record, and the form with what was entered.
pub(super) async fn content(
    console: &Console,
    visit: &Visit,
    id: RecordId,
    inspection: &Inspection,
    shows_answer: bool,
    entered: &Entered<'_>,
) -> Result<Markup, StoreError> {
    let Some(record) = &inspection.record else { return Ok(html! { p.meaning { (inspection.meaning()) } }) };
    let mut repairs = console.operate.repairs(MOST_REPAIRS).await?;
    let are_all = repairs.len() < MOST_REPAIRS.get() as usize;
    repairs.retain(|repair| repair.note.record == id);
    Ok(html! {
        p.meaning { (inspection.meaning()) }
        (evidence(id, record, inspection))
        (timeline(record, &repairs, are_all, inspection.now))
        @if let Some(response) = response_of(record) { (answer(visit, id, response, shows_answer)) }
        (form(console, visit, id, record, inspection, entered))
    })
}

fn response_of(record: &Record) -> Option<&StoredResponse> {
    match &record.state {
        State::InProgress { .. } => None,
        State::Completed { response } | State::Failed { response, .. } => Some(response),
    }
}

/// What the record says.
fn evidence(id: RecordId, record: &Record, inspection: &Inspection) -> Markup {
    let summary = RecordSummary::new(id, inspection.origin.clone(), record);
    let now = inspection.now;
    html! {
        dl {
            dt { "Id" } dd.id { (id) }
            dt { "State" } dd { (state(&summary, now)) }
            @if let Some((name, until)) = deadline(summary.state) {
                dt { (name) }
                dd { @if now < until { "ends in " (until.age_since(now)) } @else { "over for " (now.age_since(until)) } }
            }
            @if let Some(origin) = &inspection.origin {
                @if !origin.namespace.is_empty() { dt { "Namespace" } dd { (visible(&origin.namespace)) } }
                dt { "Principal" } dd { (origin.scope.principal().map_or("single tenant".to_owned(), visible)) }
                dt { "Operation" } dd { (visible(origin.scope.operation())) }
            }
            dt { "Attempt" } dd { (summary.attempt) }
            dt { "Owner" } dd.id { (token(&record.owner)) }
            dt { "Version" } dd.id { (summary.version) }
        }
    }
}

fn deadline(state: RecordState) -> Option<(&'static str, Timestamp)> {
    match state {
        RecordState::InProgress { lease_until } => Some(("Lease", lease_until)),
        RecordState::Retryable { not_before } => Some(("Waits", not_before)),
        RecordState::Completed | RecordState::Failed | RecordState::OutcomeUnknown => None,
    }
}

/// What happened to the record, the first event first.
fn timeline(record: &Record, repairs: &[Repair], are_all: bool, now: Timestamp) -> Markup {
    let mut events = vec![(record.created_at, html! { "made by the first request" })];
    let checkpoint = record.checkpoint.as_ref().map(|checkpoint| {
        let name: &Arc<str> = &checkpoint.name;
        html! { "checkpoint " strong { (visible(name)) } ", number " (checkpoint.sequence) }
    });
    let name = RecordState::of(record).name();
    let changed = match repairs.iter().find(|repair| repair.note.action == record.owner) {
        Some(repair) => html! { "became " (name) ", as " (visible(&repair.note.actor)) " had asked" },
        None if name == StateName::InProgress => {
            html! { "attempt " (record.attempt) " began, or its lease was renewed" }
        }
        None => html! { "became " (name) " by attempt " (record.attempt) },
    };
    events.push((record.updated_at, changed));
    for Repair { at, note } in repairs {
        let text = html! {
            (visible(&note.actor)) " asked for " strong { (visible(&note.resolution)) } ": “" (visible(&note.reason)) "” – "
            (outcome(note))
        };
        events.push((*at, text));
    }
    // The list of repairs begins with the newest, and events of the same time keep their order.
    events.get_mut(2..).unwrap_or_default().reverse();
    events.sort_by_key(|(at, _)| *at);
    html! {
        h2 { "Timeline" }
        @if !are_all {
            p.note { "Only the last " (MOST_REPAIRS) " repairs of all records were read. `idem repairs` lists older ones." }
        }
        ol.timeline {
            @for (at, text) in &events { li { time { (at) } span.note { " " (now.age_since(*at)) " ago " } div { (text) } } }
            @if let Some(checkpoint) = checkpoint { li { "last " (checkpoint) } }
            li { time { (record.expires_at) } span.note { " in " (record.expires_at.age_since(now)) } div { "its retention ends" } }
        }
    }
}

/// The stored answer, its header values and body only if they are asked for.
fn answer(visit: &Visit, id: RecordId, response: &StoredResponse, is_shown: bool) -> Markup {
    html! {
        h2 #answer { "Stored answer" }
        dl {
            dt { "Status" } dd { (response.status) }
            dt { "Body" }
            dd {
                @match &response.body {
                    StoredBody::Retained(body) => { (grouped(body.len() as u64)) " bytes" },
                    StoredBody::NotRetained => "not kept: it was too large, or it was erased",
                }
            }
            @if let Some(trace) = &response.trace {
                dt { "Trace" }
                dd.id {
                    (trace) " "
                    a href={ (visit.base) "/records?trace=" (trace.trace_id()) } { "Records of this trace" }
                }
            }
            @for field in response.headers.iter() {
                dt { (visible(&String::from_utf8_lossy(&field.name))) }
                dd { @if is_shown { (visible(&String::from_utf8_lossy(&field.value))) } @else { "•••" } }
            }
        }
        @match (&response.body, is_shown, visit.permissions.reads_answers) {
            (StoredBody::Retained(body), true, _) => {
                pre tabindex="0" aria-label="Body" { (visible(&String::from_utf8_lossy(body.get(..MOST_BYTES).unwrap_or(body)))) }
                @if body.len() > MOST_BYTES { p.note { "This is the beginning of the body." } }
            }
            (_, false, true) => p { a href={ (visit.base) "/records/" (id) "?answer=shown#answer" } { "Show the values and the body" } " – they may hold secrets of the client" },
            (_, false, false) => p.note { "You may not read the values and the body." },
            (StoredBody::NotRetained, true, _) => {}
        }
    }
}
