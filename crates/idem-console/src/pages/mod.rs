//! The pages.

mod form;
pub(crate) mod overview;
pub(crate) mod record;
pub(crate) mod records;
pub(crate) mod repairs;
pub(crate) mod resolve;
mod text;

use std::error::Error;

use axum::response::{Html, IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use idem_core::{RecordId, RecordSummary, StoreError, StoreErrorKind, Timestamp};
use maud::{DOCTYPE, Markup, html};

use crate::pages::text::visible;
use crate::visit::Visit;

/// A page with its status.
#[derive(Debug)]
pub(crate) struct Page(StatusCode, Markup);

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        (self.0, Html(self.1.into_string())).into_response()
    }
}

/// The style sheet of all pages.
pub(crate) async fn style() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("../style.css"))
}

/// A page with this title and content.
fn page(visit: &Visit, status: StatusCode, title: &str, content: &Markup) -> Page {
    let base = &visit.base;
    let home = if base.is_empty() { "/" } else { base };
    let pages =
        [("Overview", home.to_owned()), ("Records", format!("{base}/records")), ("Repairs", format!("{base}/repairs"))];
    let is_hidden = |name: &str| name == "Repairs" && visit.permissions.tenant.is_some();
    Page(
        status,
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (title) " · idem" }
                    link rel="stylesheet" href={ (base) "/style.css" };
                }
                body {
                    a.skip href="#content" { "Skip to the content" }
                    header {
                        nav aria-label="Pages" {
                            @for (name, path) in pages.iter().filter(|(name, _)| !is_hidden(name)) {
                                a href=(path) aria-current=[(*name == title).then_some("page")] { (name) }
                            }
                        }
                        @if visit.permissions.reads { span.actor { "as " (visible(&visit.permissions.actor)) } }
                    }
                    main #content tabindex="-1" {
                        h1 { (title) }
                        (content)
                    }
                }
            }
        },
    )
}

/// A page that says why a request was refused.
pub(crate) fn refused(visit: &Visit, status: StatusCode, why: &str) -> Page {
    page(visit, status, "Refused", &html! { p.problem role="alert" { (why) } })
}

/// The page of a record that is not there, or that the client may not see.
fn missing(visit: &Visit) -> Page {
    let why = "There is no such record, or its retention is over.";
    page(visit, StatusCode::NOT_FOUND, "Not found", &html! { p { (why) } })
}

/// A page that says that the store did not answer.
fn failed(visit: &Visit, error: &StoreError) -> Page {
    let (status, title) = match error.kind() {
        StoreErrorKind::Misconfigured => (StatusCode::BAD_REQUEST, "The store cannot answer this"),
        StoreErrorKind::Corrupt => (StatusCode::INTERNAL_SERVER_ERROR, "The record cannot be read"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "The store did not answer"),
    };
    page(visit, status, title, &html! { p.problem role="alert" { (visible(&with_causes(error))) } })
}

/// The message of an error and those of its causes.
fn with_causes(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// A link to a record, by the first digits of its id.
fn link(visit: &Visit, id: &RecordId) -> Markup {
    let id = id.to_string();
    html! { a.id href={ (visit.base) "/records/" (id) } { (id.get(..12).unwrap_or(&id)) "…" } }
}

/// A table of records.
fn table(visit: &Visit, caption: &str, records: &[RecordSummary], now: Timestamp) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label=(caption) {
            table {
                caption { (caption) }
                thead {
                    tr { @for name in ["Record", "State", "Made", "Attempt", "Principal", "Operation"] { th scope="col" { (name) } } }
                }
                tbody {
                    @for record in records {
                        @let scope = record.origin.as_ref().map(|origin| &origin.scope);
                        tr {
                            td { (link(visit, &record.id)) }
                            td { (state(record, now)) }
                            td { (now.age_since(record.created_at)) " ago" }
                            td.number { (record.attempt) }
                            td { (scope.and_then(|scope| scope.principal()).map_or("–".to_owned(), visible)) }
                            td { (scope.map_or("–".to_owned(), |scope| visible(scope.operation()))) }
                        }
                    }
                }
            }
        }
    }
}

/// The name of a state, marked if an operator should look at it.
fn state(record: &RecordSummary, now: Timestamp) -> Markup {
    let name = if record.is_abandoned(now) { "abandoned" } else { record.state.name().as_str() };
    let is_stuck = matches!(name, "abandoned" | "outcome-unknown");
    html! { span.state.stuck[is_stuck] { (name) } }
}
