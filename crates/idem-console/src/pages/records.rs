//! A list of records by state, age and origin.

use std::time::Duration;

use axum::extract::{Query, State};
use http::StatusCode;
use idem_core::{
    Inspect, PartSize, RecordFilter, RecordSummary, ScanPosition, StateName, StoreError, StoreErrorKind, Timestamp,
    TraceId,
};
use maud::{Markup, html};
use serde::Deserialize;
use tokio::time::Instant;

use super::text::grouped;
use super::{Page, failed, page, table};
use crate::console::Console;
use crate::cursor;
use crate::visit::Visit;

/// A page ends after the part that brings it to as many records.
const ENOUGH: usize = 50;

/// How many records further parts have while none is selected. So the page gets there sooner.
const LARGER: u64 = 200;

/// A page ends after this time, whether it has found records or not: within a second it has to be there.
const PATIENCE: Duration = Duration::from_millis(600);

/// What the form asks for; an empty field asks for nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    state: String,
    older_than: String,
    abandoned: String,
    namespace: String,
    principal: String,
    operation: String,
    trace: String,
    from: String,
}

pub(crate) async fn get(State(console): State<Console>, visit: Visit, Query(wanted): Query<Wanted>) -> Page {
    let (filter, from) = match wanted.read(&console, &visit) {
        Ok(read) => read,
        Err(why) => {
            let content = html! { p.problem role="alert" { (why) } (form(&visit, &wanted)) };
            return page(&visit, StatusCode::BAD_REQUEST, "Records", &content);
        }
    };
    match listed(&*console.inspect, &filter, from).await {
        Err(error) => failed(&visit, &error),
        Ok(mut found) => {
            // A request, its job and its messages, in their order as far as they are on one page.
            if filter.trace.is_some() {
                found.records.sort_by_key(|record| record.created_at);
            }
            let content = html! { (form(&visit, &wanted)) (found.markup(&console, &visit, &wanted)) };
            page(&visit, StatusCode::OK, "Records", &content)
        }
    }
}

/// What a page found.
pub(super) struct Found {
    pub(super) records: Vec<RecordSummary>,
    scanned: u64,
    unreadable: u64,
    /// Where the next page begins; `None` at the end.
    pub(super) next: Option<ScanPosition>,
    progress: Option<f64>,
    pub(super) now: Timestamp,
}

/// Reads parts after `from` until there is enough for a page.
pub(super) async fn listed(
    store: &dyn Inspect,
    filter: &RecordFilter,
    from: Option<ScanPosition>,
) -> Result<Found, StoreError> {
    let (began, mut part) = (Instant::now(), PartSize::new());
    let (mut records, mut scanned, mut unreadable, mut last) = (Vec::new(), 0, 0, None);
    let mut next = from;
    loop {
        // Without a filter the first part is the page.
        let is_sparse = scanned > 0 && records.is_empty();
        let size = part.up_to(if is_sparse { LARGER } else { ENOUGH as u64 }).unwrap_or(part.get());
        match store.list(filter, next.as_ref(), size).await {
            Ok(found) => {
                records.extend(found.records);
                scanned += found.scanned;
                unreadable += found.unreadable;
                next = found.next;
                last = Some((found.progress, found.now));
            }
            // A smaller part would only make the client wait longer if others were read already.
            Err(error) if last.is_none() || error.kind() != StoreErrorKind::Timeout => {
                part = PartSize::of(size);
                part.shrink(error)?;
                continue;
            }
            Err(_) => {}
        }
        let is_over = next.is_none() || records.len() >= ENOUGH || began.elapsed() >= PATIENCE;
        if let Some((progress, now)) = last.filter(|_| is_over) {
            return Ok(Found { records, scanned, unreadable, next, progress, now });
        }
    }
}

impl Wanted {
    fn read(&self, console: &Console, visit: &Visit) -> Result<(RecordFilter, Option<ScanPosition>), String> {
        let text = |text: &String| (!text.is_empty()).then(|| text.clone());
        let state = text(&self.state).map(|state| state.parse::<StateName>()).transpose();
        let states = state.map_err(|error| error.to_string())?.into_iter().collect();
        let age = text(&self.older_than).map(|age| humantime::parse_duration(&age)).transpose();
        let older_than = age.map_err(|error| format!("An age looks like 5m or 2h: {error}."))?;
        let trace = text(&self.trace).map(|trace| trace.parse::<TraceId>()).transpose();
        let trace = trace.map_err(|error| error.to_string())?;
        let tenant = visit.permissions.tenant.as_ref();
        let open = |link: String| {
            let position = console.secret.as_ref().and_then(|secret| cursor::open(secret, tenant, &link));
            position.ok_or("This link is damaged, or older than this console. Begin at the first page.")
        };
        let from = text(&self.from).map(open).transpose()?;
        let filter = RecordFilter {
            states,
            older_than,
            abandoned: !self.abandoned.is_empty(),
            namespace: tenant.map(|tenant| tenant.namespace.clone()).or_else(|| text(&self.namespace)),
            principal: tenant.map(|tenant| tenant.principal.clone()).or_else(|| text(&self.principal)),
            operation: text(&self.operation),
            trace,
        };
        Ok((filter, from))
    }

    /// The fields with their names, but not the position.
    fn fields(&self) -> [(&'static str, &str); 7] {
        [
            ("state", &self.state),
            ("older_than", &self.older_than),
            ("abandoned", &self.abandoned),
            ("namespace", &self.namespace),
            ("principal", &self.principal),
            ("operation", &self.operation),
            ("trace", &self.trace),
        ]
    }
}

impl Found {
    fn markup(&self, console: &Console, visit: &Visit, wanted: &Wanted) -> Markup {
        let tenant = visit.permissions.tenant.as_ref();
        let seal = |position| console.secret.as_ref().map(|secret| cursor::seal(secret, tenant, position));
        html! {
            @if self.records.is_empty() {
                p role="status" {
                    "No record is selected"
                    // How many others there are is not for a tenant.
                    @if tenant.is_none() { " among " (grouped(self.scanned)) }
                    "."
                }
            } @else {
                (table(visit, "Records", &self.records, self.now))
            }
            @if self.unreadable > 0 && tenant.is_none() {
                p.problem { (grouped(self.unreadable)) " records cannot be read, perhaps because a newer version wrote them." }
            }
            @if let Some(next) = self.next.as_ref().and_then(seal) {
                form method="get" action={ (visit.base) "/records" } {
                    @for (name, value) in wanted.fields() { input type="hidden" name=(name) value=(value); }
                    input type="hidden" name="from" value=(next);
                    button { "Go on" }
                    @if let Some(progress) = self.progress.filter(|_| tenant.is_none()) {
                        span.note { " " (format!("{:.0}", progress * 100.0)) " % of all records were read" }
                    }
                }
            } @else {
                p.note { "This is the end of the list." }
            }
        }
    }
}

fn form(visit: &Visit, wanted: &Wanted) -> Markup {
    let texts = [
        ("older_than", "Older than", &wanted.older_than, "5m"),
        ("namespace", "Namespace", &wanted.namespace, ""),
        ("principal", "Principal", &wanted.principal, ""),
        ("operation", "Operation", &wanted.operation, "POST /v1/payments"),
        ("trace", "Trace", &wanted.trace, "4bf92f3577b34da6a3ce929d0e0e4736"),
    ];
    let is_hidden = |name: &str| visit.permissions.tenant.is_some() && matches!(name, "namespace" | "principal");
    html! {
        form.filter method="get" action={ (visit.base) "/records" } {
            label for="state" { "State" }
            select #state name="state" {
                option value="" { "any" }
                @for name in StateName::ALL {
                    option value=(name) selected[wanted.state == name.as_str()] { (name) }
                }
            }
            @for (name, label, value, example) in texts.into_iter().filter(|(name, ..)| !is_hidden(name)) {
                label for=(name) { (label) }
                input #(name) name=(name) value=(value) placeholder=(example);
            }
            label for="abandoned" { "Lease is over" }
            input #abandoned type="checkbox" name="abandoned" checked[!wanted.abandoned.is_empty()];
            button { "List" }
        }
    }
}
