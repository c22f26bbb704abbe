//! Resolves an operation that gave no answer itself.

use axum::extract::{Form, Path, State};
use axum::response::{IntoResponse, Response};
use http::header::LOCATION;
use http::{HeaderMap, StatusCode};
use idem_core::{RecordId, ResolveOutcome, machine, repair};
use maud::html;

use super::form::{Asked, Entered};
use super::text::visible;
use super::{Page, failed, missing, page, record, refused, with_causes};
use crate::console::Console;
use crate::forgery::is_from_another_site;
use crate::visit::Visit;

pub(crate) async fn post(
    State(console): State<Console>,
    visit: Visit,
    Path(id): Path<String>,
    headers: HeaderMap,
    Form(asked): Form<Asked>,
) -> Response {
    match resolved(&console, &visit, &id, &headers, &asked).await {
        // The answer to a form is a redirection, so that loading the page again sends no form again.
        Ok(id) => (StatusCode::SEE_OTHER, [(LOCATION, format!("{}/records/{id}", visit.base))]).into_response(),
        Err(page) => page.into_response(),
    }
}

async fn resolved(
    console: &Console,
    visit: &Visit,
    id: &str,
    headers: &HeaderMap,
    asked: &Asked,
) -> Result<RecordId, Page> {
    let forbidden = |why: &str| refused(visit, StatusCode::FORBIDDEN, why);
    let actor = &visit.permissions.actor;
    let id: RecordId = id.parse().map_err(|_| missing(visit))?;
    let secret = console.secret.as_ref().filter(|secret| secret.is_form(&asked.token, actor, &id));
    let Some(secret) = secret.filter(|_| !is_from_another_site(headers)) else {
        let why = "Nothing was changed: the form is not from this console, or older than it. Open the record again.";
        return Err(forbidden(why));
    };
    let inspection = match console.inspect.inspect(&id).await {
        Ok(inspection) if visit.permissions.sees(inspection.origin.as_ref()) => inspection,
        Err(error) if visit.permissions.tenant.is_none() => return Err(failed(visit, &error)),
        Ok(_) | Err(_) => return Err(missing(visit)),
    };
    let action = secret.action(actor, &id, &asked.content());
    let request = match asked.request(id, action, console.retention) {
        Ok((state, _)) if !visit.permissions.may_resolve_as(state) => {
            return Err(forbidden("Nothing was changed: you may not resolve an operation as this."));
        }
        Ok((_, request)) => request,
        // The form below would have the version of now, and what was entered was meant for another one.
        Err(_) if asked.is_about_another(inspection.record.as_ref()) => {
            return Err(unresolved(visit, &id, ResolveOutcome::Changed));
        }
        Err(problem) => {
            let problem = format!("Nothing was changed: {problem}.");
            let entered = Entered { asked: Some(asked), problem: Some(&problem) };
            let content = record::content(console, visit, id, &inspection, false, &entered).await;
            return Err(match content {
                Ok(content) => page(visit, StatusCode::BAD_REQUEST, "Record", &content),
                Err(error) => failed(visit, &error),
            });
        }
    };
    // Without this, each old form would leave a note.
    if machine::resolve(inspection.record.as_ref(), &request, inspection.now).1 == ResolveOutcome::Changed {
        return Err(unresolved(visit, &id, ResolveOutcome::Changed));
    }
    match repair(&*console.operate, &request, actor, asked.reason.trim()).await {
        Ok(ResolveOutcome::Resolved) => Ok(id),
        Ok(outcome) => Err(unresolved(visit, &id, outcome)),
        Err(error) if error.is_indeterminate() => {
            let content = html! {
                p.problem role="alert" {
                    "It is not known whether the record was resolved. Send the form again by loading this page again: the action stays \
                     the same, so that it is made once."
                }
                p.note { (visible(&with_causes(&error))) }
            };
            Err(page(visit, StatusCode::SERVICE_UNAVAILABLE, "The store did not answer", &content))
        }
        Err(error) => Err(failed(visit, &error)),
    }
}

fn unresolved(visit: &Visit, id: &RecordId, outcome: ResolveOutcome) -> Page {
    let content = html! {
        p.problem role="alert" { (outcome.meaning()) }
        p { a href={ (visit.base) "/records/" (id) } { "Look at the record again" } }
    };
    page(visit, StatusCode::CONFLICT, "Not resolved", &content)
}
