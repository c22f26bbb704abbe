//! What is stuck, and how many records there are of each state.

use axum::extract::State;
use http::StatusCode;
use idem_core::RecordCounts;
use maud::{Markup, html};

use super::text::{age, grouped, visible};
use super::{Page, page, table, with_causes};
use crate::console::{Console, Visit};
use crate::survey::{self, Findings, MOST_STUCK};

pub(crate) async fn get(State(console): State<Console>, visit: Visit) -> Page {
    let state = console.survey.state(&console.inspect).await;
    let content = html! {
        @match &state.last {
            Some(findings) => (found(&visit, findings)),
            None => p { "The records have not been counted yet." },
        }
        (survey(&state))
    };
    page(&visit, StatusCode::OK, "Overview", &content)
}

fn found(visit: &Visit, findings: &Findings) -> Markup {
    let seen = findings.stuck.iter().filter(|record| visit.permissions.sees(record.origin.as_ref()));
    let stuck: Vec<_> = seen.cloned().collect();
    html! {
        h2 { "Stuck operations" }
        @if stuck.is_empty() {
            p { "None: each operation has an answer, or a process that runs it." }
        } @else {
            @if findings.stuck.len() == MOST_STUCK { p { "These are the oldest. There may be more." } }
            (table(visit, "Operations whose process is gone, or whose outcome is not known", &stuck, findings.now))
        }
        // They are of all tenants.
        @if visit.permissions.tenant.is_none() { (counts(visit, &findings.counts, findings)) }
    }
}

fn counts(visit: &Visit, counts: &RecordCounts, findings: &Findings) -> Markup {
    let now = findings.now;
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
            dt { "Bytes of bodies" } dd { (grouped(counts.body_bytes)) }
            @if let Some(oldest) = counts.oldest_in_progress {
                dt { "Oldest in progress" } dd { "made " (age(now, oldest)) " ago" }
            }
            @if let Some(oldest) = counts.oldest_expired {
                dt { "Purge" } dd { "the oldest expired record has waited " (age(now, oldest)) }
            }
        }
    }
}

/// How far the count is.
fn survey(state: &survey::State) -> Markup {
    html! {
        p.note role="status" {
            @if let Some(findings) = &state.last { "Counted at " (findings.now) ". " }
            @if let Some((scanned, progress)) = state.running {
                "Counting now: " (grouped(scanned)) " records"
                @if let Some(progress) = progress { ", " (format!("{:.0}", progress * 100.0)) " %" }
                ". Load the page again to see more."
            }
        }
        @if let Some(error) = &state.error {
            p.problem role="alert" { "The records could not be counted: " (visible(&with_causes(&**error))) }
        }
    }
}
