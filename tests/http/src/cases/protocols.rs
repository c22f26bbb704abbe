//! What HTTP/1.1 and HTTP/2 encode differently, with the same meaning.

use super::mirror;
use super::settlements::{Repeat, fault};
use crate::PAYMENT;
use crate::client::Request;
use crate::target::Target;

pub(super) fn what_came_by_one_protocol_is_replayed_by_the_other(target: &Target) {
    for simulate in ["", "raw-header", "momentary", "stream=300000", "stream=0", "status=204", "status=404"] {
        let request = target.pay(&format!("k-{simulate}")).simulate(simulate);
        let first = target.ask(&request);
        let by_the_other = target.ask_by(target.protocol().other(), &request);
        let again = target.ask(&request);
        assert!(!first.is_replay() && by_the_other.is_replay() && again.is_replay(), "{simulate}");
        assert_eq!(by_the_other.essence(), again.essence(), "{simulate}");
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{simulate}");
    }
}

/// A request to a page whose fingerprint includes the host.
fn of_host(target: &Target, key: &str, host: &str) -> Request {
    mirror::keyed(target, "POST").set("X-Operation-Key", key).host(host)
}

pub(super) fn the_host_is_the_same_whichever_protocol_names_it(target: &Target) {
    let protocols = [target.protocol(), target.protocol().other()];
    let first = target.ask(&of_host(target, "k", "one.test"));
    assert_eq!((first.status, mirror::is_replay(&first)), (200, false));
    for protocol in protocols {
        for host in ["one.test", "ONE.test"] {
            let again = target.ask_by(protocol, &of_host(target, "k", host));
            assert!(mirror::is_replay(&again), "{host} over {}", protocol.name());
            assert_eq!(again.body, first.body);
        }
        for host in ["two.test", "one.test:8080"] {
            let other = target.ask_by(protocol, &of_host(target, "k", host));
            assert_eq!((other.status, other.problem().as_deref()), (422, Some("mismatch")), "{host}");
        }
    }
}

pub(super) fn a_target_in_absolute_form_names_its_host(target: &Target) {
    let absolute = |host: &str| of_host(target, "k", host).target("http://one.test/v1/mirror");
    let first = target.ask(&of_host(target, "k", "one.test"));
    assert_eq!((first.status, mirror::is_replay(&first)), (200, false));
    assert!(mirror::is_replay(&target.ask(&absolute("one.test"))));
    let two_hosts = target.ask(&absolute("two.test"));
    assert_eq!((two_hosts.status, two_hosts.problem().as_deref()), (400, Some("host-ambiguous")));
}

pub(super) fn a_host_beside_another_one_is_refused(target: &Target) {
    let beside = |host: &str| of_host(target, "k", "one.test").header("Host", host);
    let first = target.ask(&beside("one.test"));
    assert_eq!((first.status, mirror::is_replay(&first)), (200, false));
    assert!(mirror::is_replay(&target.ask(&of_host(target, "k", "one.test"))));
    for host in ["two.test", ""] {
        let two_hosts = target.ask(&beside(host));
        assert_eq!((two_hosts.status, two_hosts.problem().as_deref()), (400, Some("host-ambiguous")), "{host:?}");
    }
    // If the host is not in the fingerprint, the layer ignores it.
    assert_eq!(target.ask(&target.pay("k").header("Host", "test")).status, 201);
}

pub(super) fn cookies_in_several_fields_are_those_in_one(target: &Target) {
    let other = target.protocol().other();
    let request = mirror::keyed(target, "POST");
    let first = target.ask(&request.clone().header("Cookie", "a=1; b=2"));
    assert!(!mirror::is_replay(&first));
    let crumbs = request.clone().header("Cookie", "a=1").header("Cookie", "b=2");
    for protocol in [target.protocol(), other] {
        assert!(mirror::is_replay(&target.ask_by(protocol, &crumbs)), "{}", protocol.name());
        let swapped = request.clone().header("Cookie", "a=2; b=1");
        assert_eq!(target.ask_by(protocol, &swapped).problem().as_deref(), Some("mismatch"));
    }
}

pub(super) fn trailers_of_a_request_change_nothing(target: &Target) {
    let answers = ["1", "2"].map(|sum| {
        let mut upload = target.upload(&target.pay("k").header("Trailer", "x-sum"), None);
        upload.write(PAYMENT.as_bytes());
        upload.end_by_trailer("x-sum", sum);
        target.note(upload.answer().unwrap())
    });
    assert_eq!((answers[0].status, answers[0].is_replay(), answers[1].is_replay()), (201, false, true));
    assert!(target.send(&target.pay("k").header("Trailer", "x-sum")).is_replay(), "nor does their absence");
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_answer_that_never_ends_is_a_fault(target: &Target) {
    let request = mirror::keyed(target, "POST").simulate("endless");
    let first = mirror::send(target, &request);
    assert_eq!((first.status, first.problem().as_deref()), (500, Some("handler-failed")));
    let again = mirror::send(target, &request);
    match fault(target.contract()) {
        Repeat::Replay => assert!(again.status == 500 && mirror::is_replay(&again), "{again:?}"),
        Repeat::RunsAgain => assert!(again.status == 500 && !mirror::is_replay(&again), "{again:?}"),
        Repeat::Backoff => assert_eq!(again.problem().as_deref(), Some("backoff")),
    }
}

pub(super) fn streams_of_one_connection_do_not_wait_for_one_another(target: &Target) {
    let mut connection = target.connect();
    let held = connection.begin(&target.pay("held").simulate("hold-before"));
    target.await_run();
    let told = [
        (target.pay("one"), 201),
        (target.pay("one"), 201),
        (target.pay("held"), 409),
        (target.pay("one").body("{}"), 422),
        (target.keyless(), 400),
    ];
    for (request, status) in told {
        assert_eq!(target.note(connection.ask(&request).unwrap()).status, status);
    }
    target.release();
    assert_eq!(target.note(held.answer().unwrap()).status, 201);
    assert_eq!(target.effects(), 2);
}
