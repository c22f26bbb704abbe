//! What a response says about its operation.

use std::fmt;
use std::sync::Arc;

use idem_core::HeaderField;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// What a response says about its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fifth meaning")]
pub enum Meaning {
    /// The operation took effect. The response is stored, and writes are kept.
    Complete,
    /// The operation was refused for what was asked; a repeat would be refused again. The response is stored. Under
    /// Transactional, writes are rolled back.
    Reject,
    /// The request was refused, and a repeat may succeed. Nothing is stored, and the key is free. Under Transactional, writes
    /// are rolled back.
    Release,
    /// The operation failed. The contract says what follows: Transactional rolls back and may run again; AtLeastOnce runs again
    /// after a backoff; AtMostOnce stores the response.
    Fault,
}

impl Meaning {
    /// The meaning of a status.
    ///
    /// | status | meaning |
    /// |---|---|
    /// | 2xx, 3xx | complete |
    /// | 101, 401, 403, 405, 407, 421, 425, 429 | release: they say nothing about the operation |
    /// | other 4xx, except 408 | reject |
    /// | 408, 5xx and others | fault |
    ///
    /// A 408 says that the request did not arrive in time. The layer has received all of it before the handler runs. So a 408
    /// from inside mostly comes from a timeout, which may have ended the handler after its effect.
    #[must_use]
    pub fn of_status(status: u16) -> Self {
        match status {
            200..400 => Self::Complete,
            // Authentication, timing, routing and rate limits say nothing about the operation: storing them would poison
            // the key. A protocol upgrade cannot be replayed either.
            101 | 401 | 403 | 405 | 407 | 421 | 425 | 429 => Self::Release,
            408 => Self::Fault,
            400..500 => Self::Reject,
            _ => Self::Fault,
        }
    }

    /// The meaning of a response of a GraphQL server, for [`HttpPolicy::classify`](crate::HttpPolicy::classify).
    ///
    /// A GraphQL server answers 200 to a mutation that failed. The body decides, as the GraphQL specification (October 2021,
    /// section 7.1) has it:
    ///
    /// | body | meaning |
    /// |---|---|
    /// | no `errors` | that of the status |
    /// | `errors` and no `data` | release: the request was not executed |
    /// | `errors` and `data`, which may be null or partial | fault |
    ///
    /// A body that was too large to keep, or is no JSON object, has the meaning of its status.
    #[must_use]
    pub fn of_graphql(response: &AnsweredWith<'_>) -> Self {
        #[derive(Deserialize)]
        struct Body {
            #[serde(default)]
            errors: Option<Vec<IgnoredAny>>,
            #[serde(default, deserialize_with = "is_present")]
            data: bool,
        }
        let body = response.body.and_then(|body| serde_json::from_slice::<Body>(body).ok());
        match body {
            Some(Body { errors: Some(errors), data }) if !errors.is_empty() => match data {
                true => Self::Fault,
                false => Self::Release,
            },
            _ => Self::of_status(response.status),
        }
    }
}

/// A member that is there, null included.
fn is_present<'a, D: serde::Deserializer<'a>>(member: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(member).map(|_| true)
}

/// A response of the handler, for [`HttpPolicy::classify`](crate::HttpPolicy::classify).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AnsweredWith<'a> {
    /// The status.
    pub status: u16,
    /// The header fields that a record may store, with names in lower case; all of them under
    /// [`key_only`](crate::HttpPolicy::key_only), too.
    pub headers: &'a [HeaderField],
    /// The body; `None` when it is over the limit, or not to be kept.
    pub body: Option<&'a [u8]>,
}

/// Gives responses a meaning.
#[derive(Clone)]
pub(crate) struct Classifier(Arc<dyn Fn(&AnsweredWith<'_>) -> Meaning + Send + Sync>);

impl Classifier {
    pub(crate) fn new(classify: impl Fn(&AnsweredWith<'_>) -> Meaning + Send + Sync + 'static) -> Self {
        Self(Arc::new(classify))
    }

    pub(crate) fn meaning(&self, response: &AnsweredWith<'_>) -> Meaning {
        (self.0)(response)
    }
}

impl fmt::Debug for Classifier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Classifier")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_graphql(status: u16, body: Option<&str>) -> Meaning {
        Meaning::of_graphql(&AnsweredWith { status, headers: &[], body: body.map(str::as_bytes) })
    }

    #[test]
    fn a_graphql_error_is_no_success() {
        let failed = [
            r#"{"errors":[{"message":"no funds"}],"data":null}"#,
            r#"{"data":{"pay":null},"errors":[{}]}"#,
            r#"{"data":{"pay":1,"mail":null},"errors":[{}],"extensions":{}}"#,
        ];
        for body in failed {
            assert_eq!(of_graphql(200, Some(body)), Meaning::Fault, "{body}");
        }
        assert_eq!(of_graphql(200, Some(r#"{"errors":[{"message":"syntax"}]}"#)), Meaning::Release);
        assert_eq!(of_graphql(400, Some(r#"{"errors":[{"message":"syntax"}]}"#)), Meaning::Release);
    }

    #[test]
    fn everything_else_has_the_meaning_of_its_status() {
        for body in
            [Some(r#"{"data":{"pay":1}}"#), Some(r#"{"data":1,"errors":[]}"#), Some("[]"), Some("not JSON"), None]
        {
            for (status, meaning) in [
                (200, Meaning::Complete),
                (303, Meaning::Complete),
                (422, Meaning::Reject),
                (429, Meaning::Release),
                (503, Meaning::Fault),
            ] {
                assert_eq!(of_graphql(status, body), meaning, "{status} {body:?}");
            }
        }
    }
}
