//! An answer whose request is gone. Actix takes an error in its place.

use std::cell::Cell;
use std::fmt;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use idem_http::Reply;

use crate::convert::respond;

/// Gives its response to every caller. An outer middleware may call first, such as a logger that reads the status, and drop
/// the response before the client gets one.
pub(crate) struct Failure {
    reason: String,
    status: StatusCode,
    /// For the first caller only, because extensions and streaming bodies cannot be copied.
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
