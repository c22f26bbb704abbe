//! What differs between the frameworks over tower: their bodies, and where they keep the route.

use std::error::Error as StdError;
use std::fmt;

use bytes::Bytes;
use http::Uri;
use http::request::Parts;
use http_body::Body;
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;

/// An error of any body.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Describes a framework to the layer. [`Plain`] is for services without one.
pub trait Framework: Clone + Send + Sync + 'static {
    /// The body of requests to the service inside, and of the layer's responses.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static;

    /// Converts any body to the framework's type.
    fn body<B>(body: B) -> Self::Body
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static;

    /// The target that the client sent. Default: that of the request; a nested router may show its services only a part of
    /// the path.
    fn target(head: &Parts) -> &Uri {
        &head.uri
    }

    /// The pattern of the route, such as `/v1/payments/{id}`, if a router has left it. It becomes part of the scope. Default:
    /// none, so the scope has the path.
    fn route(head: &Parts) -> Option<&str> {
        let _ = head;
        None
    }
}

/// No framework: hyper, or a router without an integration. [`Route`] gives it the pattern of the route.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but a name")]
pub struct Plain;

/// The pattern of the route, such as `/v1/payments/{id}`. Put it into the request's extensions outside of the layer. Without
/// it the scope has the path, so a key belongs to one path.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its pattern")]
pub struct Route(pub &'static str);

/// The error of a body of [`Plain`] that broke off. Its source says why.
#[derive(Debug)]
pub struct Error(BoxError);

impl Error {
    fn of(error: impl Into<BoxError>) -> Self {
        // A body that was converted before already has this error.
        error.into().downcast().map_or_else(Self, |error| *error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the body broke off")
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.0)
    }
}

impl Framework for Plain {
    type Body = UnsyncBoxBody<Bytes, Error>;

    fn body<B>(body: B) -> Self::Body
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        body.map_err(Error::of).boxed_unsync()
    }

    fn route(head: &Parts) -> Option<&str> {
        head.extensions.get::<Route>().map(|route| route.0)
    }
}
