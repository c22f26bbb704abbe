//! Passes requests to idem-http as adapters do.
#![expect(clippy::expect_used, reason = "an oracle says what it expects by failing")]

use std::num::NonZeroUsize;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use idem_core::engine::{Idempotency, Settings};
use idem_core::{Fingerprint, MemoryStore};
use idem_http::{BodyError, Decision, Protection, RequestHead, SingleTenant};
use tokio::runtime::{Builder, Runtime};

thread_local! {
    static PROTECTION: Protection<SingleTenant> = {
        let store = Arc::new(MemoryStore::new(NonZeroUsize::MIN));
        Protection::new(Idempotency::at_least_once(store, Settings::new())).single_tenant()
    };
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().expect("a runtime starts");
}

/// The decision for a POST with these header fields.
pub(crate) fn decision(query: Option<&str>, fields: &[(&str, &[u8])]) -> Decision {
    let head = RequestHead {
        method: "POST",
        authority: None,
        path: "/pay",
        query,
        route: None,
        headers: fields,
        is_protected: false,
    };
    PROTECTION.with(|protection| protection.decide(&(), &head))
}

/// The fingerprint of a POST with a key.
pub(crate) fn fingerprint(query: Option<&str>, fields: &[(&str, &[u8])], body: &[u8]) -> Fingerprint {
    let Decision::Receive(incoming) = decision(query, fields) else { panic!("a request with a key is not protected") };
    let body = stream::iter([Ok::<_, BodyError>(Bytes::copy_from_slice(body))]);
    PROTECTION.with(|protection| {
        let received = RUNTIME.with(|runtime| runtime.block_on(protection.receive(incoming, body)));
        *received.expect("a short body is taken").operation.fingerprint()
    })
}
