//! An answer for which there is no request any more. Actix wants an error in its place.

use std::cell::Cell;
use std::fmt;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use idem_http::Reply;

use crate::convert::respond;

/// Gives its response to everyone who asks: outer middlewares do, such as a logger for the status, and drop it before the
/// client's turn.
pub(crate) struct Failure {
    reason: String,
    status: StatusCode,
    /// Extensions, and bodies that stream, can be had once.
    first: Cell<Option<HttpResponse>>,
    again: Reply,
}

impl Failure {
    pub(crate) fn new(reason: String, first: HttpResponse, again: Reply) -> Self {
        Self { reason, status: first.status(), first: Cell::new(Some(first)), again }
    }
}

impl ResponseError for Failure {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        self.first.take().unwrap_or_else(|| respond(self.again.clone()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)
    }
}

/// Shows nothing of the answer.
impl fmt::Debug for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Failure").field(&self.reason).finish()
    }
}
