//! What is stuck, and how many records there are of each state.

use axum::extract::State;
use http::StatusCode;
use idem_core::{RecordFilter, RecordSummary, Timestamp};
use maud::{Markup, html};

use super::records::{Found, listed};
use super::text::{grouped, visible};
use super::{Page, failed, page, table, with_causes};
use crate::access::Tenant;
use crate::console::Console;
use crate::survey::{self, Findings, MOST_STUCK, candidates, is_stuck};
use crate::visit::Visit;

pub(crate) async fn get(State(console): State<Console>, visit: Visit) -> Page {
    if let Some(tenant) = &visit.permissions.tenant {
        return of_tenant(&console, &visit, tenant).await;
    }
    let state = console.survey.state(&console.inspect).await;
    // Before the first survey has ended, what it has found so far.
    let (findings, is_whole) = match (&state.last, &state.running) {
        (Some(findings), _) => (Some(findings), true),
        (None, running) => (running.as_ref().map(|(findings, _)| findings), false),
    };
    let content = html! {
        @if let Some((findings, now)) = findings.and_then(|findings| Some((findings, findings.now?))) {
            (stuck(&visit, &findings.stuck, is_whole && findings.stuck.len() < MOST_STUCK, now))
            @if is_whole { (counts(&visit, findings, now)) }
        } @else {
            p { "The records have not been counted yet." }
        }
        (survey(&state))
    };
    page(&visit, StatusCode::OK, "Overview", &content)
}

/// Reads the first records of a tenant. Counts are of all tenants, and so is a survey.
async fn of_tenant(console: &Console, visit: &Visit, tenant: &Tenant) -> Page {
    let filter = RecordFilter {
        namespace: Some(tenant.namespace.clone()),
        principal: Some(tenant.principal.clone()),
        ..candidates()
    };
    match listed(&*console.inspect, &filter, None).await {
        Err(error) => failed(visit, &error),
        Ok(Found { mut records, next, now, .. }) => {
            records.retain(|record| is_stuck(record, now));
            page(visit, StatusCode::OK, "Overview", &stuck(visit, &records, next.is_none(), now))
        }
    }
}

fn stuck(visit: &Visit, stuck: &[RecordSummary], are_all: bool, now: Timestamp) -> Markup {
    let links = ["abandoned=on", "state=outcome-unknown"].map(|query| format!("{}/records?{query}", visit.base));
    html! {
        h2 { "Stuck operations" }
        @match (stuck.is_empty(), are_all) {
            (true, true) => p { "None: each operation has an answer, or a process that runs it." },
            (true, false) => p { "None so far. Not all records have been read." },
            (false, _) => (table(visit, "Operations whose process is gone, or whose outcome is not known", stuck, now)),
        }
        @if !are_all {
            p.note {
                "There may be more: list those " a href=(links[0]) { "whose lease is over" } " and those "
                a href=(links[1]) { "whose outcome is not known" } "."
            }
        }
    }
}

fn counts(visit: &Visit, findings: &Findings, now: Timestamp) -> Markup {
    let counts = &findings.counts;
    let rows = [
        ("in-progress", counts.in_progress, "a process runs it"),
        ("abandoned", counts.abandoned, "in progress, and its lease is over"),
        ("completed", counts.completed, "it took effect"),
        ("failed", counts.failed, "it never runs again"),
        ("outcome-unknown", counts.outcome_unknown, "its process crashed, and repeats get 504"),
        ("retryable", counts.retryable, "it may run again"),
        ("expired", counts.expired, "its retention is over, and it is not purged yet"),
        ("unreadable", counts.unreadable, "perhaps written by a newer version"),
    ];
    let path = |name: &str| match name {
        "abandoned" => Some(format!("{}/records?abandoned=on", visit.base)),
        "expired" | "unreadable" => None,
        state => Some(format!("{}/records?state={state}", visit.base)),
    };
    html! {
        h2 { "States" }
        table {
            caption { "Records by state" }
            thead { tr { th scope="col" { "State" } th.number scope="col" { "Records" } th scope="col" { "Meaning" } } }
            tbody {
                @for (name, count, meaning) in rows {
                    tr {
                        th scope="row" { @match path(name) { Some(path) => a href=(path) { (name) }, None => (name) } }
                        td.number { (grouped(count)) }
                        td { (meaning) }
                    }
                }
            }
        }
        dl {
            dt { "Made in the last hour" }
            dd {
                (grouped(counts.made_last_hour)) ", " (rate(counts.made_last_hour)) " a minute; "
                (grouped(counts.unsuccessful_last_hour)) " without success so far"
            }
            dt { "Bytes of bodies" } dd { (grouped(counts.body_bytes)) }
            @if let Some(oldest) = counts.oldest_in_progress {
                dt { "Oldest in progress" } dd { "made " (now.age_since(oldest)) " ago" }
            }
            @if let Some(oldest) = counts.oldest_expired {
                dt { "Purge" } dd { "the oldest expired record has waited " (now.age_since(oldest)) }
            }
        }
    }
}

/// As many in an hour, in a minute.
fn rate(in_an_hour: u64) -> String {
    format!("{:.1}", in_an_hour as f64 / 60.0)
}

/// How far the count is.
fn survey(state: &survey::State) -> Markup {
    html! {
        p.note role="status" {
            @if let Some(now) = state.last.as_ref().and_then(|findings| findings.now) { "Counted at " (now) ". " }
            @if let Some((findings, progress)) = &state.running {
                "Counting now: " (grouped(findings.counts.scanned())) " records"
                @if let Some(progress) = progress { ", " (format!("{:.0}", progress * 100.0)) " %" }
                ". Load the page again to see more."
            }
        }
        @if let Some(error) = &state.error {
            p.problem role="alert" { "The records could not be counted: " (visible(&with_causes(&**error))) }
        }
    }
}
