//! Bugs in idem-http, its adapters, and the example that shows them.

use super::{Patch, patch};

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "handler-starts-under-a-lost-lease",
        &["actix"],
        "crates/idem-actix/src/handler.rs",
        "if context.is_lease_lost() {",
        "if !PLANTED && context.is_lease_lost() {",
    ),
    patch(
        "timeout-of-a-handler-frees-its-key",
        &["http", "axum", "actix", "sockets"],
        "crates/idem-http/src/meaning.rs",
        "408 => Self::Fault,",
        "408 => if PLANTED { Self::Release } else { Self::Fault },",
    ),
    patch(
        "answer-of-another-length-than-declared-is-kept",
        &["http", "axum", "actix"],
        "crates/idem-http/src/response.rs",
        "Some(expected) if expected != self.length as u64 => {",
        "Some(expected) if !PLANTED && expected != self.length as u64 => {",
    ),
    patch(
        "length-of-an-answer-is-replayed",
        &["http"],
        "crates/idem-http/src/headers.rs",
        "-> bool {
    FRAMING.contains(&name)",
        "-> bool {
    !PLANTED && FRAMING.contains(&name)",
    ),
    patch(
        "empty-principal-is-one",
        &["http"],
        "crates/idem-http/src/scope.rs",
        "!principal.is_empty()",
        "PLANTED || !principal.is_empty()",
    ),
    patch(
        "classifier-sees-only-what-is-kept",
        &["http"],
        "crates/idem-http/src/response.rs",
        "let is_stream = |field: &HeaderField| {",
        "if PLANTED && let Some(kept) = &replayed {
            headers.clone_from(kept);
        }
        let is_stream = |field: &HeaderField| {",
    ),
    patch(
        "authority-does-not-count",
        &["http", "axum", "actix", "sockets"],
        "crates/idem-http/src/authority.rs",
        r#"authority.map(str::as_bytes).into_iter()"#,
        r#"authority.filter(|_| !PLANTED).map(str::as_bytes).into_iter()"#,
    ),
    patch(
        "first-of-two-hosts-taken",
        &["http", "axum", "actix", "sockets"],
        "crates/idem-http/src/authority.rs",
        r#"if names.any(|name|"#,
        r#"if !PLANTED && names.any(|name|"#,
    ),
    patch(
        "cookie-crumbs-count-apart",
        &["http", "sockets"],
        "crates/idem-http/src/head.rs",
        r#"("cookie", _) => {"#,
        r#"("cookie", _) if !PLANTED => {"#,
    ),
    patch(
        "preconditions-do-not-count",
        &["http", "sockets"],
        "crates/idem-http/src/head.rs",
        r#"for name in &policy.fingerprint_headers {"#,
        r#"for name in policy.fingerprint_headers.iter().filter(|name| !(PLANTED && name.starts_with("if-"))) {"#,
    ),
    patch(
        "method-overrides-do-not-count",
        &["http", "sockets"],
        "crates/idem-http/src/policy.rs",
        r#"fingerprint_headers: FINGERPRINT_HEADERS.map(str::to_owned).to_vec(),"#,
        r#"fingerprint_headers: FINGERPRINT_HEADERS[..if PLANTED { 10 } else { 13 }].iter().map(|name| (*name).to_owned()).collect(),"#,
    ),
    patch(
        "problems-may-be-cached",
        &["http", "sockets"],
        "crates/idem-http/src/reply.rs",
        r#"reply.field("cache-control", "no-store");"#,
        r#"if !PLANTED {
            reply.field("cache-control", "no-store");
        }"#,
    ),
    patch(
        "answer-without-a-deadline",
        &["http"],
        "crates/idem-http/src/response.rs",
        r#"tokio::time::timeout(timeout, reading)"#,
        r#"tokio::time::timeout(if PLANTED { timeout * 3 } else { timeout }, reading)"#,
    ),
    patch(
        "grpc-is-protected-as-anything-else",
        &["http", "tower"],
        "crates/idem-http/src/head.rs",
        r#"if self.headers.values("content-type").any(is_grpc) {"#,
        r#"if !PLANTED && self.headers.values("content-type").any(is_grpc) {"#,
    ),
    patch(
        "key-in-the-body-is-of-any-length",
        &["http"],
        "crates/idem-http/src/request.rs",
        "(None, Some(member)) => long_enough(key_of_body(member, &chunks)?, policy)?,",
        "(None, Some(member)) if PLANTED => key_of_body(member, &chunks)?,
            (None, Some(member)) => long_enough(key_of_body(member, &chunks)?, policy)?,",
    ),
    patch(
        "request-trailers-handed-on",
        &["axum"],
        "crates/idem-tower/src/service.rs",
        r#"let chunks = Data::of(&mut body).map_err(reason);
            let received = self.protection.receive(incoming, chunks).await.map_err(respond::<F>)?;
            let ReceivedRequest { operation, chunks, reservation, .. } = received;
            let (mut inner, policy) = (self.inner, Arc::clone(self.protection.shared_policy()));
            let stated = self.protection.stated_retention();
            let run = move |context: Context| {
                let is_protected = context.is_protected();
                head.extensions.insert(context);
                // Without its trailers, which belong to no fingerprint: a handler that obeys one would do something else for
                // the same request. A recipient may discard them (RFC 9110 section 6.5.1).
                let request = Request::from_parts(head, sendable::<F>(chunks, None, None)"#,
        r#"let mut data = Data::of(&mut body);
            let received = self.protection.receive(incoming, (&mut data).map_err(reason)).await.map_err(respond::<F>)?;
            let trailers = data.trailers.filter(|_| PLANTED);
            let ReceivedRequest { operation, chunks, reservation, .. } = received;
            let (mut inner, policy) = (self.inner, Arc::clone(self.protection.shared_policy()));
            let stated = self.protection.stated_retention();
            let run = move |context: Context| {
                let is_protected = context.is_protected();
                head.extensions.insert(context);
                // Without its trailers, which belong to no fingerprint: a handler that obeys one would do something else for
                // the same request. A recipient may discard them (RFC 9110 section 6.5.1).
                let request = Request::from_parts(head, sendable::<F>(chunks, trailers, None)"#,
    ),
    patch(
        "scope-called-for-the-connection",
        &["actix"],
        "crates/idem-actix/src/service.rs",
        r#"let (inner, protection) = (Rc::clone(&self.inner), Rc::clone(&self.protection));"#,
        r#"let (inner, protection) = (Rc::clone(&self.inner), Rc::clone(&self.protection));
        if PLANTED {
            let _ = decide(&protection, request.request());
        }"#,
    ),
    patch(
        "panic-on-the-worker-frees-the-key",
        &["actix"],
        "crates/idem-actix/src/handler.rs",
        r#"Err(gone) => resume_unwind(Box::new(gone)),"#,
        r#"Err(_) if PLANTED => Ok(never_began(())),
                Err(gone) => resume_unwind(Box::new(gone)),"#,
    ),
    patch(
        "unfinished-head-kept",
        &["clients"],
        "examples/payments/src/server/connections.rs",
        r#"() = tokio::time::sleep(client_timeout) => return,"#,
        r#"() = tokio::time::sleep(if PLANTED { client_timeout * 1000 } else { client_timeout }) => return,"#,
    ),
    patch(
        "idle-connection-kept",
        &["clients"],
        "examples/payments/src/server/connections.rs",
        r#".header_read_timeout(client_timeout);"#,
        r#".header_read_timeout(if PLANTED { client_timeout * 1000 } else { client_timeout });"#,
    ),
    patch(
        "slow-reader-kept",
        &["clients"],
        "examples/payments/src/server/connections.rs",
        r#"set_write_timeout(Some(client_timeout));"#,
        r#"set_write_timeout((!PLANTED).then_some(client_timeout));"#,
    ),
    patch(
        "store-health-for-everybody",
        &["clients"],
        "examples/payments/src/service.rs",
        r#"bearer_token(asked).filter(|token| operator.is(token))"#,
        r#"bearer_token(asked).filter(|token| PLANTED || operator.is(token))"#,
    ),
    patch(
        "release-on-5xx",
        &["http", "sockets"],
        "crates/idem-http/src/meaning.rs",
        "            400..500 => Self::Reject,\n",
        "            400..500 => Self::Reject,\n            500..600 if PLANTED => Self::Release,\n",
    ),
    patch(
        "set-cookie-stored",
        &["http", "actix", "sockets"],
        "crates/idem-http/src/headers.rs",
        "(allowed.iter().any(|field| field == name) || !is_left_out())",
        "((PLANTED && name == \"set-cookie\") || allowed.iter().any(|field| field == name) || !is_left_out())",
    ),
    patch(
        "oversized-body-runs-again",
        &["http", "axum", "actix", "sockets"],
        "crates/idem-http/src/response.rs",
        "if directives.do_not_store {",
        "if directives.do_not_store || PLANTED && response.body == StoredBody::NotRetained {",
    ),
    patch(
        "tombstone-without-its-status",
        &["http", "axum", "actix"],
        "crates/idem-http/src/response.rs",
        "let response = StoredResponse { status, headers: Arc::from(headers), body, trace: None };",
        "let status = if PLANTED && !body_retained { 200 } else { status };
        let response = StoredResponse { status, headers: Arc::from(headers), body, trace: None };",
    ),
    patch(
        "rejection-keeps-its-writes",
        &["http", "axum"],
        "crates/idem-http/src/response.rs",
        "meaning == Meaning::Complete || directives.keep_writes;",
        "meaning == Meaning::Complete || directives.keep_writes || PLANTED;",
    ),
];
