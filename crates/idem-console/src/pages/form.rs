//! The form that resolves an operation: its fields, and what it asks for.

use std::time::Duration;

use idem_core::{
    HeaderField, Inspection, OwnerToken, Record, RecordId, RecordVersion, Resolution, Resolve, ResolveOutcome,
    StateName, StoredBody, StoredResponse, machine,
};
use maud::{Markup, html};
use serde::Deserialize;

use super::text::visible;
use crate::console::Console;
use crate::visit::Visit;

/// The states that can be asked for, and what each means.
const CHOICES: [(StateName, &str); 4] = [
    (StateName::OutcomeUnknown, "Mark it as unknown: its process can no longer settle it. First for a crashed run."),
    (StateName::Completed, "It took effect. Repeats get the answer below."),
    (StateName::Failed, "It took no effect and never runs again. Repeats get the answer below, from status 400 on."),
    (
        StateName::Retryable,
        "It took no effect. After the wait below, the next request with its key runs it again, unless its attempts are used up.",
    ),
];

/// How long a reason may be, in bytes. The list of repairs reads many.
const LONGEST_REASON: usize = 4_096;

/// What was entered before, and what was wrong with it.
#[derive(Debug, Default)]
pub(super) struct Entered<'a> {
    pub(super) asked: Option<&'a Asked>,
    pub(super) problem: Option<&'a str>,
}

/// What the form sends.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    pub(super) token: String,
    seen: String,
    #[serde(rename = "as")]
    state: String,
    pub(super) reason: String,
    status: String,
    content_type: String,
    body: String,
    retry_after: String,
}

/// The form, with the states that the record can have next and that the client may ask for.
pub(super) fn form(
    console: &Console,
    visit: &Visit,
    id: RecordId,
    record: &Record,
    inspection: &Inspection,
    entered: &Entered<'_>,
) -> Markup {
    let is_possible = |state: StateName| {
        let response = (state != StateName::OutcomeUnknown).then(|| StoredResponse::new(400, ""));
        let request = Resolution::new(state, response, None).map(|resolution| Resolve {
            id,
            action: OwnerToken::random(),
            seen: record.version(),
            resolution,
            retention: console.retention,
        });
        let outcome = request.map(|request| machine::resolve(Some(record), &request, inspection.now).1);
        !inspection.runs_in_transaction && outcome == Ok(ResolveOutcome::Resolved)
    };
    let possible: Vec<_> = CHOICES.into_iter().filter(|(state, _)| is_possible(*state)).collect();
    let permitted: Vec<_> = possible.iter().filter(|(state, _)| visit.permissions.may_resolve_as(*state)).collect();
    let (Some(secret), false) = (&console.secret, possible.is_empty()) else { return Markup::default() };
    let empty = Asked::default();
    let asked = entered.asked.unwrap_or(&empty);
    let is_unknown_only = permitted.iter().all(|(state, _)| *state == StateName::OutcomeUnknown);
    html! {
        h2 #resolve { "Resolve" }
        @if let Some(problem) = entered.problem { p.problem #problem role="alert" { (visible(problem)) } }
        @if permitted.is_empty() {
            p.note { "You may not resolve it." }
        } @else {
            form.resolve method="post" action={ (visit.base) "/records/" (id) "/resolve" } {
                input type="hidden" name="token" value=(secret.form(&visit.permissions.actor, &id));
                input type="hidden" name="seen" value=(record.version());
                fieldset {
                    legend { "How did it end?" }
                    @for (state, meaning) in permitted {
                        div.choice {
                            input type="radio" name="as" value=(state) id=(state) required checked[asked.state == state.as_str()];
                            label for=(state) { strong { (state) } " – " (meaning) }
                        }
                    }
                }
                @if !is_unknown_only {
                    fieldset {
                        legend { "The answer that repeats get" }
                        label for="status" { "Status" }
                        input #status name="status" inputmode="numeric" pattern="[2-5][0-9][0-9]" placeholder="201" value=(asked.status);
                        label for="content_type" { "Content type" }
                        input #content_type name="content_type" placeholder="application/json" value=(asked.content_type);
                        label for="body" { "Body" }
                        textarea #body name="body" rows="4" { "\n" (asked.body) }
                        label for="retry_after" { "Wait, for retryable" }
                        input #retry_after name="retry_after" placeholder="30s" value=(asked.retry_after);
                    }
                }
                label for="reason" { "Reason. It stays in the store, with your name." }
                textarea #reason name="reason" rows="2" required maxlength=(LONGEST_REASON) aria-describedby=[entered.problem.map(|_| "problem")] {
                    "\n" (asked.reason)
                }
                button { "Resolve" }
            }
        }
    }
}

impl Asked {
    /// Whether the form was made for another version of the record.
    pub(super) fn is_about_another(&self, record: Option<&Record>) -> bool {
        self.seen.parse().is_ok_and(|seen: RecordVersion| record.is_none_or(|record| record.version() != seen))
    }

    /// All that was entered, and the version that it is about.
    pub(super) fn content(&self) -> [&str; 7] {
        let Self { token: _, seen, state, reason, status, content_type, body, retry_after } = self;
        [seen, state, reason, status, content_type, body, retry_after]
    }

    pub(super) fn request(
        &self,
        id: RecordId,
        action: OwnerToken,
        retention: Duration,
    ) -> Result<(StateName, Resolve), String> {
        let state = self.state.parse().map_err(|_| "say how the operation ended".to_owned())?;
        if self.reason.trim().is_empty() {
            return Err("the reason is empty. Say why, for those who look at this record later".into());
        } else if self.reason.len() > LONGEST_REASON {
            return Err(format!("the reason has more than {LONGEST_REASON} bytes"));
        }
        let seen: RecordVersion = self.seen.parse().map_err(|_| "the form has no version of the record".to_owned())?;
        let wait = (!self.retry_after.trim().is_empty()).then(|| humantime::parse_duration(self.retry_after.trim()));
        let wait = wait.transpose().map_err(|error| format!("a wait looks like 30s or 5m: {error}"))?;
        let resolution = Resolution::new(state, self.response()?, wait).map_err(|error| error.to_string())?;
        Ok((state, Resolve { id, action, seen, resolution, retention }))
    }

    /// The answer that repeats get; `None` if each of its fields is empty.
    fn response(&self) -> Result<Option<StoredResponse>, String> {
        let [status, content_type] = [&self.status, &self.content_type].map(|text| text.trim());
        if status.is_empty() && content_type.is_empty() && self.body.is_empty() {
            return Ok(None);
        }
        let status = status.parse().map_err(|_| "the answer needs a status, such as 201".to_owned())?;
        if http::HeaderValue::from_str(content_type).is_err() {
            return Err("the content type is no value of a header field".into());
        }
        let field = HeaderField { name: "content-type".into(), value: content_type.to_owned().into() };
        let headers = if content_type.is_empty() { Vec::new() } else { vec![field] };
        // Browsers send each line break as two characters.
        let body = self.body.replace("\r\n", "\n");
        Ok(Some(StoredResponse {
            status,
            headers: headers.into(),
            body: StoredBody::Retained(body.into()),
            trace: None,
        }))
    }
}
