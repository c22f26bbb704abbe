//! Who asks, and where the console is mounted.

use axum::extract::{FromRequestParts, OriginalUri};
use http::StatusCode;
use http::request::Parts;

use crate::access::Permissions;
use crate::console::Console;

/// Who asks, and where the console is mounted.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) permissions: Permissions,
    /// What links begin with.
    pub(crate) base: String,
}

impl FromRequestParts<Console> for Visit {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, console: &Console) -> Result<Self, Self::Rejection> {
        let permissions = console.access.permissions(parts).await;
        let original = parts.extensions.get::<OriginalUri>().map_or(parts.uri.path(), |original| original.0.path());
        let visit = Self { permissions, base: base(original, parts.uri.path()).to_owned() };
        match visit.permissions.reads {
            true => Ok(visit),
            false => Err((StatusCode::FORBIDDEN, "You may not use this console.\n")),
        }
    }
}

/// The path at which the console is mounted, from that of a request and what the router has left of it.
fn base<'a>(original: &'a str, inner: &str) -> &'a str {
    let base = original.strip_suffix(inner).unwrap_or(if inner == "/" { original } else { "" });
    // Two slashes would begin the name of another host.
    if base.starts_with("//") { "" } else { base }
}

#[cfg(test)]
mod tests {
    use super::base;

    #[test]
    fn links_begin_with_the_path_of_the_console() {
        assert_eq!(base("/", "/"), "");
        assert_eq!(base("/records/ab", "/records/ab"), "");
        assert_eq!(base("/admin/idem", "/"), "/admin/idem");
        assert_eq!(base("/admin/idem/records", "/records"), "/admin/idem");
        assert_eq!(base("//elsewhere/records", "/records"), "");
        assert_eq!(base("/rewritten", "/records"), "");
    }
}
