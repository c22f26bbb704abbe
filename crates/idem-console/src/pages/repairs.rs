//! The list of repairs.

use std::num::NonZeroU32;

use axum::extract::State;
use http::StatusCode;
use idem_core::{Repair, RepairNote};
use maud::{Markup, html};

use super::text::{token, visible};
use super::{Page, failed, link, page, refused};
use crate::console::Console;
use crate::visit::Visit;

/// How many repairs a page shows.
const MOST: NonZeroU32 = NonZeroU32::new(200).expect("not zero");

pub(crate) async fn get(State(console): State<Console>, visit: Visit) -> Page {
    if visit.permissions.tenant.is_some() {
        return refused(&visit, StatusCode::FORBIDDEN, "The list of repairs is of all tenants.");
    }
    match console.operate.repairs(MOST).await {
        Err(error) => failed(&visit, &error),
        Ok(repairs) if repairs.is_empty() => {
            page(&visit, StatusCode::OK, "Repairs", &html! { p { "No record was ever repaired." } })
        }
        Ok(repairs) => page(&visit, StatusCode::OK, "Repairs", &table(&visit, &repairs)),
    }
}

fn table(visit: &Visit, repairs: &[Repair]) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label="Repairs" {
            table {
                caption { "The last repairs, the newest first" }
                thead { tr { @for name in ["Time", "Record", "As", "Outcome", "By", "Reason"] { th scope="col" { (name) } } } }
                tbody {
                    @for Repair { at, note } in repairs {
                        tr {
                            td { (at) }
                            td { (link(visit, &note.record)) }
                            td { (visible(&note.resolution)) }
                            td { (outcome(note)) }
                            td { (visible(&note.actor)) }
                            td { (visible(&note.reason)) }
                        }
                    }
                }
            }
        }
    }
}

/// How a repair ended.
pub(super) fn outcome(note: &RepairNote) -> String {
    let action = token(&note.action);
    note.outcome
        .as_deref()
        .map_or_else(|| format!("not known; it was made if the record has the owner {action}"), visible)
}
