use bytes::Bytes;
use idem_core::{Fingerprint, Scope};

use super::*;
use crate::policy::FINGERPRINT_HEADERS;
use crate::request::IncomingRequest;

type Fields<'a> = [(&'a str, &'a [u8])];

const KEY: (&str, &[u8]) = ("idempotency-key", b"abc");
const JSON: (&str, &[u8]) = ("content-type", b"application/json");

#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Pass,
    Refuse(ProblemKind),
    Protect,
}

fn head<'a>(method: &'a str, headers: &'a Fields<'a>) -> RequestHead<'a, &'a Fields<'a>> {
    RequestHead { method, authority: None, path: "/p", query: None, route: None, headers, is_protected: false }
}

fn decide(policy: &HttpPolicy, method: &str, headers: &Fields<'_>) -> Decision {
    match head(method, headers).read(policy) {
        Ok(None) => Decision::Pass,
        Err(problem) => Decision::Refuse(problem.kind()),
        Ok(Some(_)) => Decision::Protect,
    }
}

/// A request that is always protected; tests change one thing of it.
#[derive(Clone)]
struct Sent<'a> {
    method: &'a str,
    authority: Option<&'a str>,
    path: &'a str,
    query: Option<&'a str>,
    headers: Vec<(&'a str, &'a [u8])>,
    body: &'a [u8],
}

const SENT: Sent<'_> =
    Sent { method: "POST", authority: None, path: "/p", query: None, headers: Vec::new(), body: b"{\"a\":1}" };

impl Sent<'_> {
    fn fingerprint(&self, policy: &HttpPolicy) -> Fingerprint {
        let headers: Vec<_> = self.headers.iter().copied().chain([KEY]).collect();
        let Self { method, authority, path, query, .. } = *self;
        let head = RequestHead { method, authority, path, query, ..head(method, &headers) };
        let keyed = head.read(policy).unwrap().expect("it is protected");
        let scope = Scope::new("acme", head.operation());
        let mut request = IncomingRequest::new(scope, keyed, &head.headers, policy).unwrap();
        request.push(Bytes::copy_from_slice(self.body)).unwrap();
        *request.finish(policy).unwrap().operation.fingerprint()
    }
}

/// The fingerprint of a JSON body by default settings.
fn json(body: &str) -> Fingerprint {
    Sent { headers: vec![JSON], body: body.as_bytes(), ..SENT }.fingerprint(&HttpPolicy::new())
}

#[test]
fn only_post_and_patch_are_protected_by_default() {
    let policy = HttpPolicy::new();
    for method in ["POST", "PATCH"] {
        assert_eq!(decide(&policy, method, &[KEY]), Decision::Protect, "{method}");
    }
    for method in ["GET", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PUT", "DELETE", "PURGE", "post", ""] {
        assert_eq!(decide(&policy, method, &[KEY]), Decision::Pass, "{method}");
    }
}

#[test]
fn named_methods_replace_the_defaults() {
    let policy = HttpPolicy::new().methods(&["PUT", "DELETE"]);
    for method in ["PUT", "DELETE"] {
        assert_eq!(decide(&policy, method, &[KEY]), Decision::Protect, "{method}");
    }
    assert_eq!(decide(&policy, "POST", &[KEY]), Decision::Pass);
}

#[test]
fn methods_that_carry_no_operation_are_never_protected_even_if_named() {
    const NEVER: [&str; 5] = ["GET", "HEAD", "OPTIONS", "CONNECT", "TRACE"];
    let policy = HttpPolicy::new().methods(&[&NEVER[..], &["POST"]].concat());
    for method in NEVER {
        assert_eq!(decide(&policy, method, &[KEY]), Decision::Pass, "{method}");
        assert_eq!(decide(&policy, method, &[]), Decision::Pass, "{method} without a key");
    }
    assert_eq!(decide(&policy, "POST", &[KEY]), Decision::Protect);
}

#[test]
fn a_missing_key_is_refused_where_it_is_required_and_passes_where_it_is_optional() {
    let (required, optional) = (HttpPolicy::new(), HttpPolicy::new().key_optional());
    assert_eq!(decide(&required, "POST", &[]), Decision::Refuse(ProblemKind::KeyMissing));
    assert_eq!(decide(&optional, "POST", &[]), Decision::Pass);
    assert_eq!(decide(&optional, "POST", &[KEY]), Decision::Protect);
}

#[test]
fn a_key_that_cannot_be_read_is_refused_also_where_it_is_optional() {
    let malformed: [&Fields<'_>; 5] = [
        &[("idempotency-key", b"")],
        &[("idempotency-key", b"\"open")],
        &[("idempotency-key", b"a b")],
        &[("idempotency-key", b"a,b")],
        &[KEY, KEY],
    ];
    for headers in malformed {
        for policy in [HttpPolicy::new(), HttpPolicy::new().key_optional()] {
            assert_eq!(decide(&policy, "POST", headers), Decision::Refuse(ProblemKind::KeyInvalid), "{headers:?}");
        }
    }
}

#[test]
fn a_refused_key_is_explained_and_not_repeated() {
    let headers: &Fields<'_> = &[("idempotency-key", b"secret key")];
    let Err(problem) = head("POST", headers).read(&HttpPolicy::new()) else { panic!("accepted") };
    let document: serde_json::Value = serde_json::from_slice(&problem.to_json()).unwrap();
    let detail = document["detail"].as_str().unwrap();
    assert!(detail.contains("0x20") && !detail.contains("secret"), "{detail}");
}

#[test]
fn the_key_header_can_have_another_name_in_any_case() {
    let policy = HttpPolicy::new().key_header("X-Request-Token");
    assert_eq!(decide(&policy, "POST", &[("x-request-token", b"abc")]), Decision::Protect);
    assert_eq!(decide(&policy, "POST", &[KEY]), Decision::Refuse(ProblemKind::KeyMissing));
}

#[test]
fn every_part_of_the_head_counts() {
    let policy = HttpPolicy::new();
    let text: (&str, &[u8]) = ("content-type", b"text/plain");
    let base = Sent { headers: vec![text], ..SENT };
    let others = [
        base.clone(),
        Sent { method: "PATCH", ..base.clone() },
        Sent { path: "/p/", ..base.clone() },
        Sent { path: "/P", ..base.clone() },
        Sent { query: Some(""), ..base.clone() },
        Sent { query: Some("x"), ..base.clone() },
        Sent { query: Some("x="), ..base.clone() },
        Sent { headers: Vec::new(), ..base.clone() },
        Sent { headers: vec![("content-type", b"text/html")], ..base.clone() },
        Sent { headers: vec![text, ("content-encoding", b"gzip")], ..base.clone() },
        Sent { headers: vec![text, text], ..base.clone() },
        Sent { body: b"{\"a\":2}", ..base.clone() },
        Sent { body: b"", ..base },
    ];
    let fingerprints: Vec<_> = others.iter().map(|other| other.fingerprint(&policy)).collect();
    for (index, one) in fingerprints.iter().enumerate() {
        assert_eq!(fingerprints.iter().position(|other| other == one), Some(index), "two of the requests are one");
    }
}

#[test]
fn the_parts_of_the_head_do_not_run_into_one_another() {
    let policy = HttpPolicy::new();
    let one = Sent { path: "/p", query: Some("q"), ..SENT }.fingerprint(&policy);
    let other = Sent { path: "/pq", query: Some(""), ..SENT }.fingerprint(&policy);
    let third = Sent { path: "/p?q", query: None, ..SENT }.fingerprint(&policy);
    assert!(one != other && one != third && other != third);
}

#[test]
fn headers_that_are_not_listed_do_not_count_and_the_key_is_none_of_it() {
    let policy = HttpPolicy::new();
    let unlisted: [(&str, &[u8]); 3] = [("user-agent", b"x"), ("accept", b"*/*"), ("x-tenant", b"1")];
    let with = Sent { headers: unlisted.to_vec(), ..SENT };
    assert_eq!(with.fingerprint(&policy), SENT.fingerprint(&policy));
}

#[test]
fn a_header_can_be_added_to_the_fingerprint_with_all_its_lines() {
    let policy = HttpPolicy::new().fingerprint_header("X-Version");
    let fingerprint = |headers: &Fields<'_>| Sent { headers: headers.to_vec(), ..SENT }.fingerprint(&policy);
    let (one, two) = (("x-version", b"1".as_slice()), ("x-version", b"2".as_slice()));
    let distinct = [
        fingerprint(&[]),
        fingerprint(&[("x-version", b"")]),
        fingerprint(&[one]),
        fingerprint(&[two]),
        fingerprint(&[one, two]),
        fingerprint(&[two, one]),
    ];
    for (index, one) in distinct.iter().enumerate() {
        assert_eq!(distinct.iter().position(|other| other == one), Some(index));
    }
    let in_type = Sent { headers: vec![("content-type", b"text/plain")], ..SENT };
    let in_other = Sent { headers: vec![("content-type", b"text/html")], ..SENT };
    assert_ne!(in_type.fingerprint(&policy), in_other.fingerprint(&policy), "the defaults are still listed");
}

#[test]
fn preconditions_methods_in_disguise_and_what_says_where_a_body_belongs_count_by_default() {
    let policy = HttpPolicy::new();
    for name in FINGERPRINT_HEADERS {
        let of = |value: &'static [u8]| Sent { headers: vec![(name, value)], ..SENT }.fingerprint(&policy);
        assert_ne!(of(b"1"), SENT.fingerprint(&policy), "{name}");
        assert_ne!(of(b"1"), of(b"2"), "{name}");
    }
}

#[test]
fn what_asks_for_another_form_of_the_answer_does_not_count() {
    let policy = HttpPolicy::new();
    for name in ["accept", "accept-language", "accept-encoding", "accept-charset", "prefer", "te"] {
        let with = Sent { headers: vec![(name, b"1")], ..SENT };
        assert_eq!(with.fingerprint(&policy), SENT.fingerprint(&policy), "{name}");
    }
}

#[test]
fn a_host_counts_where_it_is_named_and_the_same_by_every_protocol() {
    for name in ["Host", ":authority"] {
        let policy = HttpPolicy::new().fingerprint_header(name);
        let of = |authority, headers: &Fields<'_>| {
            Sent { authority, headers: headers.to_vec(), ..SENT }.fingerprint(&policy)
        };
        let (a, b) = (("host", b"a.example".as_slice()), ("host", b"b.example".as_slice()));
        let over_http_1 = of(None, &[a]);
        assert_eq!(of(Some("a.example"), &[]), over_http_1, "HTTP/2");
        assert_eq!(of(Some("a.example"), &[a]), over_http_1, "HTTP/1.1 in absolute form");
        assert_eq!(of(Some("A.EXAMPLE"), &[]), over_http_1, "a host has no case");
        assert_ne!(of(Some("b.example"), &[]), over_http_1);
        assert_ne!(of(None, &[b]), over_http_1);
        assert_ne!(of(None, &[]), over_http_1);
    }
    let policy = HttpPolicy::new();
    let elsewhere = Sent { authority: Some("a.example"), ..SENT };
    assert_eq!(elsewhere.fingerprint(&policy), SENT.fingerprint(&policy), "it is no default");
}

#[test]
fn a_request_that_names_two_hosts_is_refused_where_the_host_counts() {
    let policy = HttpPolicy::new().fingerprint_header("host");
    let other = ("host", b"b.example".as_slice());
    let headers = [KEY, other];
    let head = RequestHead { authority: Some("a.example"), ..head("POST", &headers) };
    let inspect = |policy: &HttpPolicy| head.read(policy).err().map(|problem| problem.kind());
    assert_eq!(inspect(&policy), Some(ProblemKind::HostAmbiguous));
    assert_eq!(inspect(&HttpPolicy::new()), None, "it is none of its business where the host does not count");
}

#[test]
fn cookies_count_the_same_in_one_line_and_in_several() {
    let policy = HttpPolicy::new().fingerprint_header("Cookie");
    let of = |headers: &Fields<'_>| Sent { headers: headers.to_vec(), ..SENT }.fingerprint(&policy);
    let crumbs = of(&[("cookie", b"a=1"), ("cookie", b"b=2")]);
    assert_eq!(crumbs, of(&[("cookie", b"a=1; b=2")]), "HTTP/2 allows either (RFC 9113 section 8.2.3)");
    assert_ne!(crumbs, of(&[("cookie", b"b=2"), ("cookie", b"a=1")]));
    assert_ne!(of(&[]), of(&[("cookie", b"")]));
}

#[test]
fn json_bodies_count_by_their_meaning_and_numbers_as_written() {
    assert_eq!(json(r#"{"a":1,"b":2}"#), json("{ \"b\": 2,\n \"a\": 1 }"));
    assert_ne!(json(r#"{"a":1}"#), json(r#"{"a":1.0}"#));
    assert_ne!(json(r#"{"a":9007199254740992}"#), json(r#"{"a":9007199254740993}"#));
}

#[test]
fn an_encoded_json_body_counts_byte_for_byte() {
    let policy = HttpPolicy::new();
    let encoded = |encoding: &'static [u8], body| {
        Sent { headers: vec![JSON, ("content-encoding", encoding)], body, ..SENT }.fingerprint(&policy)
    };
    let (compact, spaced): (&[u8], &[u8]) = (b"{\"a\":1}", b"{ \"a\": 1 }");
    assert_ne!(encoded(b"gzip", compact), encoded(b"gzip", spaced));
    assert_eq!(encoded(b"gzip", compact), encoded(b"gzip", compact));
    assert_eq!(encoded(b"identity", compact), encoded(b"identity", spaced));
}

#[test]
fn ignored_members_of_json_do_not_count_and_all_others_do() {
    let policy = HttpPolicy::new().ignore_members(["/sent_at", "/meta/trace"].map(|pointer| pointer.parse().unwrap()));
    let fingerprint = |body: &str| Sent { headers: vec![JSON], body: body.as_bytes(), ..SENT }.fingerprint(&policy);
    let base = fingerprint(r#"{"amount":1,"sent_at":"08:00","meta":{"trace":1,"user":"u"}}"#);
    assert_eq!(fingerprint(r#"{"amount":1,"sent_at":"09:00","meta":{"trace":2,"user":"u"}}"#), base);
    assert_ne!(fingerprint(r#"{"amount":2,"sent_at":"08:00","meta":{"trace":1,"user":"u"}}"#), base);
    assert_ne!(fingerprint(r#"{"amount":1,"sent_at":"08:00","meta":{"trace":1,"user":"v"}}"#), base);
    let text = |body: &'static [u8]| {
        Sent { headers: vec![("content-type", b"text/plain")], body, ..SENT }.fingerprint(&policy)
    };
    assert_ne!(text(br#"{"sent_at":"08:00"}"#), text(br#"{"sent_at":"09:00"}"#), "only JSON has members");
}

fn form(boundary: &str, part: &str) -> (String, String) {
    let content_type = format!("multipart/form-data; boundary={boundary}");
    let body =
        format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{part}\r\n--{boundary}--\r\n");
    (content_type, body)
}

fn form_fingerprint((content_type, body): &(String, String)) -> Fingerprint {
    let headers: Vec<(&str, &[u8])> = vec![("content-type", content_type.as_bytes())];
    Sent { headers, body: body.as_bytes(), ..SENT }.fingerprint(&HttpPolicy::new())
}

#[test]
fn the_boundary_of_multipart_does_not_count_and_its_parts_do() {
    let base = form_fingerprint(&form("b1", "one"));
    assert_eq!(form_fingerprint(&form("another", "one")), base);
    assert_ne!(form_fingerprint(&form("b1", "two")), base);
    let (content_type, body) = form("b1", "one");
    let mixed = (content_type.replace("form-data", "mixed"), body);
    assert_ne!(form_fingerprint(&mixed), base, "the media type counts without its boundary");
}

#[test]
fn grpc_is_refused_where_it_would_be_protected_and_nowhere_else() {
    const GRPC: (&str, &[u8]) = ("content-type", b"Application/gRPC+proto");
    let required = HttpPolicy::new();
    let optional = HttpPolicy::new().key_optional();
    let in_body = HttpPolicy::new().key_optional().key_member("/id".parse().unwrap());
    let refused = Decision::Refuse(ProblemKind::GrpcUnsupported);
    assert_eq!(decide(&required, "POST", &[GRPC, KEY]), refused);
    assert_eq!(decide(&required, "POST", &[GRPC]), refused);
    assert_eq!(decide(&optional, "POST", &[GRPC, KEY]), refused);
    assert_eq!(decide(&in_body, "POST", &[GRPC]), refused);
    assert_eq!(decide(&optional, "POST", &[GRPC]), Decision::Pass);
    assert_eq!(decide(&required, "GET", &[GRPC, KEY]), Decision::Pass);
    assert_eq!(decide(&required, "POST", &[("content-type", &b"application/graphql"[..]), KEY]), Decision::Protect);
}
