//! How problems are written: their type, and the body that takes the place of the usual document.

use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;

use crate::problem::{Problem, TYPE_BASE};

/// How problems are written.
#[derive(Debug, Clone)]
pub(crate) struct ProblemStyle {
    /// The prefix of their `type`.
    pub(crate) type_base: Cow<'static, str>,
    pub(crate) body: Option<ProblemBody>,
}

impl Default for ProblemStyle {
    fn default() -> Self {
        Self { type_base: Cow::Borrowed(TYPE_BASE), body: None }
    }
}

impl ProblemStyle {
    /// The content type and the body of a problem that is answered with `status`.
    pub(crate) fn write(&self, problem: &Problem, status: u16) -> (Bytes, Bytes) {
        let own = self.body.as_ref().and_then(|body| body.write(problem, status));
        own.unwrap_or_else(|| {
            let document = problem.to_json_with(&self.type_base, status);
            (Bytes::from_static(b"application/problem+json"), document.into())
        })
    }
}

type Write = dyn Fn(&Problem, u16) -> Vec<u8> + Send + Sync;

/// The application's own form of errors.
#[derive(Clone)]
pub(crate) struct ProblemBody {
    content_type: Bytes,
    write: Arc<Write>,
}

impl ProblemBody {
    pub(crate) fn new(content_type: &str, write: impl Fn(&Problem, u16) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self { content_type: Bytes::copy_from_slice(content_type.as_bytes()), write: Arc::new(write) }
    }

    fn write(&self, problem: &Problem, status: u16) -> Option<(Bytes, Bytes)> {
        // The panic hook has already reported a panic.
        let body = catch_unwind(AssertUnwindSafe(|| (self.write)(problem, status))).ok()?;
        Some((self.content_type.clone(), body.into()))
    }
}

impl fmt::Debug for ProblemBody {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ProblemBody").field("content_type", &self.content_type).finish_non_exhaustive()
    }
}
