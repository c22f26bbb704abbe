//! Which site a request is for.

use crate::problem::{Problem, ProblemKind};

/// Host and port as the request names them, in lower case; `None` when it names none.
///
/// HTTP/1.1 sends them in `Host`, HTTP/2 and HTTP/3 in `:authority`. A target in absolute form has them in addition to
/// `Host`. The request is the same, so all places count alike.
///
/// # Errors
/// Two places that differ. RFC 9112 section 3.2.2 and RFC 9113 section 8.3.1 say that the target counts, and many frameworks
/// read `Host`. The layer cannot know which site would answer.
pub(crate) fn host<'a>(
    authority: Option<&'a str>,
    fields: impl Iterator<Item = &'a [u8]>,
) -> Result<Option<Vec<u8>>, Problem> {
    let mut names = authority.map(str::as_bytes).into_iter().chain(fields);
    let Some(first) = names.next() else { return Ok(None) };
    if names.any(|name| !name.eq_ignore_ascii_case(first)) {
        return Err(Problem::new(ProblemKind::HostAmbiguous));
    }
    Ok(Some(first.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_of(authority: Option<&str>, fields: &[&str]) -> Result<Option<String>, ProblemKind> {
        let host = host(authority, fields.iter().map(|field| field.as_bytes()));
        host.map(|host| host.map(|host| String::from_utf8(host).unwrap())).map_err(|problem| problem.kind())
    }

    #[test]
    fn the_host_is_the_same_in_whichever_place_it_stands() {
        let named = Ok(Some("a.example:8080".to_owned()));
        assert_eq!(host_of(None, &["a.example:8080"]), named, "HTTP/1.1");
        assert_eq!(host_of(Some("a.example:8080"), &[]), named, "HTTP/2");
        assert_eq!(host_of(Some("A.example:8080"), &["a.Example:8080"]), named, "both, as in absolute form");
        assert_eq!(host_of(None, &["a.example:8080", "a.example:8080"]), named);
        assert_eq!(host_of(None, &[]), Ok(None), "HTTP/1.0");
    }

    #[test]
    fn two_hosts_are_refused() {
        let refused = Err(ProblemKind::HostAmbiguous);
        assert_eq!(host_of(Some("a.example"), &["b.example"]), refused);
        assert_eq!(host_of(Some("a.example"), &["a.example", "b.example"]), refused);
        assert_eq!(host_of(None, &["a.example", "b.example"]), refused);
        assert_eq!(host_of(Some("a.example"), &["a.example:80"]), refused, "a port may be another site");
        assert_eq!(host_of(Some("a.example"), &[""]), refused);
        assert_eq!(host_of(Some("user@a.example"), &["a.example"]), refused);
    }
}
