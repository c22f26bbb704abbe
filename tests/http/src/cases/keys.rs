//! The syntax and the scope of keys.

use crate::target::Target;

pub(super) fn a_quoted_and_a_bare_key_are_the_same_whatever_the_case_of_the_header_name(target: &Target) {
    let first = target.send(&target.pay("k-1"));
    assert_eq!(first.status, 201);
    for (name, value) in [("IDEMPOTENCY-KEY", "\"k-1\""), ("idempotency-key", "k-1"), ("Idempotency-Key", " k-1 ")] {
        let again = target.send(&target.keyless().header(name, value));
        assert!(again.is_replay(), "{name}: {value}");
        assert_eq!(again.essence(), first.essence());
    }
    assert_eq!(target.effects(), 1);
}

pub(super) fn whatever_is_not_one_key_is_refused_and_leaves_no_record(target: &Target) {
    let too_long = "k".repeat(256);
    let malformed: [&[u8]; 12] = [
        b"",
        b"\"\"",
        b"\"unterminated",
        b"\"a\"b",
        b"a b",
        b"a,b",
        b"a\tb",
        "caf\u{e9}".as_bytes(),
        b"\xFF",
        too_long.as_bytes(),
        b"\"a\\b\"",
        b"\"a\", \"a\"",
    ];
    for value in malformed {
        let answer = target.send(&target.keyless().header("Idempotency-Key", value));
        assert_eq!((answer.status, answer.problem().as_deref()), (400, Some("key-invalid")), "{value:?}");
        assert!(!answer.is_replay());
    }
    let twice = target.send(&target.pay("k").header("Idempotency-Key", "k"));
    assert_eq!((twice.status, twice.problem().as_deref()), (400, Some("key-invalid")));
    let missing = target.send(&target.keyless());
    assert_eq!((missing.status, missing.problem().as_deref()), (400, Some("key-missing")));
    assert_eq!(target.effects(), 0);
    // A record of the key that was sent twice would make this a mismatch.
    assert_eq!(target.send(&target.pay("k").body(crate::PAYMENT.replace("1250", "1"))).status, 201);
}

pub(super) fn a_key_with_control_bytes_never_gets_through(target: &Target) {
    for value in [b"a\x01b".as_slice(), b"a\x7Fb", b"\x00"] {
        let answer = target.ask(&target.keyless().header("Idempotency-Key", value));
        assert_eq!(answer.status, 400, "{value:?}");
    }
    assert_eq!(target.effects(), 0);
}

pub(super) fn the_longest_key_is_a_key_quoted_or_not(target: &Target) {
    let longest = "k".repeat(255);
    assert_eq!(target.send(&target.pay(&longest)).status, 201);
    assert!(target.send(&target.pay(&format!("\"{longest}\""))).is_replay());
    assert_eq!(target.send(&target.pay(&longest[1..])).status, 201);
    assert_eq!(target.effects(), 2);
}

pub(super) fn two_tenants_with_the_same_key_never_meet(target: &Target) {
    let other = format!("{}-other", target.tenant());
    let first = target.send(&target.pay("k"));
    let theirs = target.send(&target.pay("k").tenant(&other));
    assert_eq!((first.status, theirs.status), (201, 201));
    assert!(!theirs.is_replay());
    assert_ne!(first.body, theirs.body);
    let again = target.send(&target.pay("k").set("Authorization", format!("bearer {other}")));
    assert!(again.is_replay(), "the scheme has no case");
    assert_eq!(again.body, theirs.body);
    assert_eq!(target.effects(), 1);
}

pub(super) fn two_routes_with_the_same_key_never_meet(target: &Target) {
    let (payment, quote) = (target.send(&target.pay("k")), target.send(&target.pay("k").target("/v1/quotes")));
    assert_eq!((payment.status, quote.status), (201, 201));
    assert!(!quote.is_replay());
    assert_eq!(quote.json()["fee"], 37);
    for (target_path, first) in [("/v1/payments", payment), ("/v1/quotes", quote)] {
        let again = target.send(&target.pay("k").target(target_path));
        assert!(again.is_replay(), "{target_path}");
        assert_eq!(again.essence(), first.essence());
    }
    assert_eq!(target.effects(), 1);
}

pub(super) fn where_a_key_is_optional_a_request_without_one_is_not_protected(target: &Target) {
    let keyless = target.keyless().target("/v1/quotes");
    let quotes = [target.send(&keyless), target.send(&keyless)];
    for quote in &quotes {
        assert_eq!((quote.status, quote.is_replay(), &quote.json()["repeatable"]), (201, false, &false.into()));
    }
    assert_ne!(quotes[0].json()["id"], quotes[1].json()["id"]);
    assert_eq!(target.send(&keyless.clone().without("Authorization")).status, 401);
    let malformed = target.send(&keyless.clone().header("Idempotency-Key", "a b"));
    assert_eq!(malformed.problem().as_deref(), Some("key-invalid"));
    let keyed = keyless.header("Idempotency-Key", "k");
    let (first, again) = (target.send(&keyed), target.send(&keyed));
    assert_eq!((&first.json()["repeatable"], again.is_replay()), (&true.into(), true));
    assert_eq!(again.essence(), first.essence());
}

pub(super) fn a_request_without_a_principal_is_401_even_without_a_key(target: &Target) {
    for request in [target.pay("k"), target.keyless(), target.pay("\"")] {
        let answer = target.send(&request.without("Authorization"));
        assert_eq!((answer.status, answer.problem().as_deref()), (401, Some("principal-missing")));
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
}
