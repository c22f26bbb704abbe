use super::*;
use crate::policy::HttpPolicy;

const NO_HEADERS: &[(&str, &[u8])] = &[];

/// Everything that a handler can say, by name.
fn all_directives() -> Vec<(&'static str, ResponseDirectives)> {
    let none = ResponseDirectives::new;
    vec![
        ("none", none()),
        ("do not store", none().do_not_store()),
        ("retryable", none().retryable_after(None)),
        ("retryable after", none().retryable_after(Duration::from_secs(7))),
        ("keep writes", none().keep_writes()),
        ("retain for", none().retain_for(Duration::from_secs(60))),
        ("do not retain body", none().do_not_retain_body()),
        ("do not store, keep writes", none().do_not_store().keep_writes()),
        ("do not store, retryable", none().do_not_store().retryable_after(None)),
    ]
}

fn concluded(status: u16, directives: &ResponseDirectives) -> Conclusion<Vec<Bytes>> {
    let mut capture = HttpPolicy::new().capture(status, NO_HEADERS, Some(directives));
    if capture.begin() == Captured::More {
        assert_eq!(capture.push("body".into()), Captured::More);
    }
    capture.conclude()
}

/// The expected disposition, specified a second time and by status alone.
fn expected(status: u16, name: &str) -> Disposition {
    let body = match name {
        "do not retain body" => StoredBody::NotRetained,
        _ => StoredBody::Retained("body".into()),
    };
    let response = StoredResponse { status, headers: Arc::from([]), body, trace: None };
    let released = [101, 401, 403, 405, 407, 421, 425, 429].contains(&status);
    let succeeded = status / 100 == 2 || status / 100 == 3;
    let writes = if succeeded || name.contains("keep writes") { Writes::Keep } else { Writes::Discard };
    match name {
        "do not store" | "do not store, keep writes" | "do not store, retryable" => Disposition::Release { writes },
        "retryable" => Disposition::Retry { response, after: None },
        "retryable after" => Disposition::Retry { response, after: Some(Duration::from_secs(7)) },
        _ if released => Disposition::Release { writes },
        _ if succeeded || status / 100 == 4 && status != 408 => Disposition::Complete { response, writes },
        _ => Disposition::Fault { response },
    }
}

#[test]
fn only_a_time_that_the_handler_gives_is_told() {
    let told =
        |directives: &ResponseDirectives| HttpPolicy::new().capture(503, NO_HEADERS, Some(directives)).retry_after_s();
    for (name, directives) in all_directives() {
        assert_eq!(told(&directives), (name == "retryable after").then_some(7), "{name}");
    }
    let almost = ResponseDirectives::new().retryable_after(Duration::from_millis(6_001));
    assert_eq!(told(&almost), Some(7));
    assert_eq!(told(&almost.clone().do_not_store()), None);
}

#[test]
fn every_status_becomes_what_the_design_says_under_every_directive() {
    for (name, directives) in all_directives() {
        for status in 100..=599 {
            let conclusion = concluded(status, &directives);
            assert_eq!(conclusion.disposition, expected(status, name), "{status}, {name}");
            let retention = (name == "retain for").then_some(Duration::from_secs(60));
            assert_eq!(conclusion.retention, retention, "{status}, {name}");
        }
    }
}

#[test]
fn statuses_outside_of_the_standard_are_faults() {
    for status in [0, 99, 600, 999, u16::MAX] {
        let disposition = concluded(status, &ResponseDirectives::new()).disposition;
        assert!(matches!(disposition, Disposition::Fault { .. }), "{status}: {disposition:?}");
    }
}

#[test]
fn no_directives_are_the_same_as_empty_ones() {
    let capture = HttpPolicy::new().capture(201, NO_HEADERS, None);
    let without = capture.conclude();
    let with = HttpPolicy::new().capture(201, NO_HEADERS, Some(&ResponseDirectives::new())).conclude();
    assert_eq!((without.disposition, without.retention), (with.disposition, with.retention));
}

/// Pushes chunks of these lengths while they are wanted, under a limit of 8 bytes.
fn pushed(lengths: &[usize]) -> (Captured, Conclusion<Vec<Bytes>>) {
    let mut capture = HttpPolicy::new().stored_response_limit(8).capture(200, NO_HEADERS, None);
    let mut captured = capture.begin();
    for &length in lengths {
        assert_eq!(captured, Captured::More, "a chunk was not wanted: {lengths:?}");
        captured = capture.push(vec![b'x'; length].into());
    }
    (captured, capture.conclude())
}

fn stored_body(conclusion: &Conclusion<Vec<Bytes>>) -> &StoredBody {
    match &conclusion.disposition {
        Disposition::Complete { response, .. } => &response.body,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_body_is_kept_up_to_the_limit_however_it_is_cut() {
    for lengths in [&[][..], &[0], &[7], &[8], &[4, 4], &[8, 0], &[0, 7, 1], &[1; 8]] {
        let (captured, conclusion) = pushed(lengths);
        assert_eq!(captured, Captured::More, "{lengths:?}");
        let whole = vec![b'x'; lengths.iter().sum()];
        assert_eq!(*stored_body(&conclusion), StoredBody::Retained(whole.into()), "{lengths:?}");
    }
}

#[test]
fn a_body_over_the_limit_becomes_a_tombstone_and_no_byte_is_lost() {
    for lengths in [&[9][..], &[8, 1], &[4, 4, 1], &[4, 5], &[0, 1000]] {
        let (captured, conclusion) = pushed(lengths);
        assert_eq!(captured, Captured::Enough, "{lengths:?}");
        assert_eq!(*stored_body(&conclusion), StoredBody::NotRetained, "{lengths:?}");
        let to_send: usize = conclusion.value.iter().map(Bytes::len).sum();
        assert_eq!(to_send, lengths.iter().sum::<usize>(), "the client gets all of it");
    }
}

#[test]
fn a_limit_of_nothing_keeps_empty_bodies_only() {
    let policy = HttpPolicy::new().stored_response_limit(0);
    let mut empty = policy.capture(204, NO_HEADERS, None);
    assert_eq!(empty.push(Bytes::new()), Captured::More);
    assert_eq!(*stored_body(&empty.conclude()), StoredBody::Retained(Bytes::new()));
    assert_eq!(policy.capture(200, NO_HEADERS, None).push("x".into()), Captured::Enough);
}

#[test]
fn chunks_are_joined_in_their_order_and_given_back_without_empty_ones() {
    let mut capture = HttpPolicy::new().capture(200, NO_HEADERS, None);
    for chunk in ["one, ", "", "two, ", "three"] {
        assert_eq!(capture.push(chunk.into()), Captured::More);
    }
    let conclusion = capture.conclude();
    assert_eq!(*stored_body(&conclusion), StoredBody::Retained("one, two, three".into()));
    assert_eq!(conclusion.value, ["one, ", "two, ", "three"]);
}

#[test]
fn an_event_stream_is_past_the_limit_before_it_begins() {
    for content_type in ["text/event-stream", "Text/Event-Stream; charset=utf-8"] {
        let headers = [("content-type", content_type.as_bytes())];
        let capture = HttpPolicy::new().capture(200, &headers[..], None);
        assert_eq!(capture.begin(), Captured::Enough, "{content_type}");
        assert_eq!(*stored_body(&capture.conclude()), StoredBody::NotRetained, "{content_type}");
    }
    let headers = [("content-type", b"text/plain".as_slice()), ("x-kind", b"text/event-stream")];
    assert_eq!(HttpPolicy::new().capture(200, &headers[..], None).begin(), Captured::More);
}

#[test]
fn a_body_that_is_marked_is_not_wanted_at_all() {
    let directives = ResponseDirectives::new().do_not_retain_body();
    assert_eq!(HttpPolicy::new().capture(200, NO_HEADERS, Some(&directives)).begin(), Captured::Enough);
}

#[test]
fn once_over_the_limit_a_body_stays_over_it() {
    let mut capture = HttpPolicy::new().stored_response_limit(2).capture(200, NO_HEADERS, None);
    assert_eq!(capture.push("abc".into()), Captured::Enough);
    assert_eq!(capture.push(Bytes::new()), Captured::Enough);
    assert_eq!(capture.begin(), Captured::Enough);
}

#[test]
fn headers_are_filtered_and_allowed_ones_stay() {
    let headers: [(&str, &[u8]); 4] =
        [("location", b"/p/1"), ("set-cookie", b"s=1"), ("x-request-id", b"7"), ("location", b"/p/2")];
    let stored = |policy: HttpPolicy| match policy.capture(201, &headers[..], None).conclude().disposition {
        Disposition::Complete { response, .. } => {
            let fields = response.headers.iter().map(|field| (field.name.clone(), field.value.clone()));
            fields.collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let field = |name: &'static str, value: &'static str| (Bytes::from(name), Bytes::from(value));
    let lasting = [field("location", "/p/1"), field("location", "/p/2")];
    assert_eq!(stored(HttpPolicy::new()), lasting);
    let allowed = stored(HttpPolicy::new().allow_stored_header("X-Request-Id"));
    assert_eq!(allowed, [field("location", "/p/1"), field("x-request-id", "7"), field("location", "/p/2")]);
}

#[test]
fn what_a_response_says_is_not_in_debug_output() {
    let headers = [("x-token", b"secret-header".as_slice())];
    let mut capture = HttpPolicy::new().capture(200, &headers[..], None);
    capture.push("secret-body".into());
    assert!(!format!("{capture:?}").contains("secret"), "the capture shows the response: {capture:?}");
}

/// How a body ends under a limit of a second, and after how long by the clock of the test.
async fn read_within_a_second(body: impl Stream<Item = Result<Bytes, &'static str>>) -> (Option<Captured>, Duration) {
    let capture = HttpPolicy::new().response_body_timeout(Duration::from_secs(1)).capture(200, NO_HEADERS, None);
    let began = tokio::time::Instant::now();
    let read = capture.read(body).await;
    (read.ok().map(|(_, captured)| captured), began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_body_that_takes_too_long_broke_off_however_much_of_it_came() {
    let never_ends = futures_util::stream::pending();
    assert_eq!(read_within_a_second(never_ends).await, (None, Duration::from_secs(1)));
    let trickles = futures_util::stream::unfold((), async |()| {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Some((Ok(Bytes::from_static(b"x")), ()))
    });
    assert_eq!(read_within_a_second(trickles).await, (None, Duration::from_secs(1)));
    let in_time = futures_util::stream::once(async {
        tokio::time::sleep(Duration::from_millis(900)).await;
        Ok(Bytes::from_static(b"x"))
    });
    assert_eq!(read_within_a_second(in_time).await, (Some(Captured::More), Duration::from_millis(900)));
}

#[tokio::test]
async fn a_body_that_is_not_as_long_as_declared_broke_off() {
    let read = async |status: u16, declared: &str, sized: Option<u64>, body: &'static str| {
        let headers = [("content-length", declared.as_bytes())];
        let mut capture = HttpPolicy::new().capture(status, &headers[..], None);
        if let Some(bytes) = sized {
            capture = capture.expect_bytes(Some(bytes));
        }
        let chunks = futures_util::stream::iter([Ok::<_, &str>(Bytes::from(body))]);
        capture.read(chunks).await.ok().map(|(conclusion, _)| conclusion.value.concat().len())
    };
    assert_eq!(read(200, "4", None, "body").await, Some(4));
    assert_eq!(read(200, "5", None, "body").await, None, "it is too short");
    assert_eq!(read(200, "3", None, "body").await, None, "it is too long");
    assert_eq!(read(200, "9", Some(4), "body").await, Some(4), "the framework knows better");
    assert_eq!(read(304, "4", None, "").await, Some(0), "that is the length of the body that it would have");
}

#[test]
fn what_is_read_of_an_answer_does_not_depend_on_what_is_kept_of_it() {
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let policy = |key_only: bool| {
        let seen = std::sync::Arc::clone(&seen);
        let policy = HttpPolicy::new().classify(move |response| {
            seen.lock().unwrap().push(response.headers.len());
            Meaning::of_status(response.status)
        });
        if key_only { policy.key_only() } else { policy }
    };
    for key_only in [false, true] {
        let stream = [("content-type", b"text/event-stream".as_slice()), ("location", b"/p/1")];
        let capture = policy(key_only).capture(200, &stream[..], None);
        assert_eq!(capture.begin(), Captured::Enough, "an event stream is not awaited");
        let Disposition::Complete { response, .. } = capture.conclude().disposition else { panic!("a success") };
        assert_eq!(response.headers.len(), if key_only { 1 } else { 2 });
    }
    assert_eq!(*seen.lock().unwrap(), [2, 2]);
}

#[test]
fn named_headers_are_the_only_ones_that_are_stored_where_a_policy_says_so() {
    let headers = [
        ("content-type", b"application/json".as_slice()),
        ("content-encoding", b"gzip"),
        ("cache-control", b"private"),
        ("location", b"/p/1"),
        ("x-inner", b"1"),
        ("x-named", b"2"),
        ("set-cookie", b"s=1"),
    ];
    let stored = |policy: HttpPolicy| {
        let mut capture = policy.capture(201, &headers[..], None);
        capture.push("body".into());
        let Disposition::Complete { response, .. } = capture.conclude().disposition else { panic!("a success") };
        let names = response.headers.iter().map(|field| String::from_utf8(field.name.to_vec()).unwrap());
        (names.collect::<Vec<_>>().join(" "), response.body != StoredBody::Retained(Bytes::new()))
    };
    let named = || HttpPolicy::new().allow_stored_header("X-Named");
    let all = "content-type content-encoding cache-control location x-inner x-named";
    assert_eq!(stored(named()), (all.to_owned(), true));
    let some = "content-type content-encoding cache-control location x-named";
    assert_eq!(stored(named().store_named_headers_only()), (some.to_owned(), true));
    assert_eq!(stored(named().store_named_headers_only().key_only()), ("location x-named".to_owned(), false));
}

/// On the real clock, which goes on while the stream blocks the thread.
#[tokio::test]
async fn a_body_of_empty_chunks_without_end_is_too_long_as_well() {
    let endless = futures_util::stream::repeat_with(|| Ok(Bytes::new()));
    assert_eq!(read_within_a_second(endless).await.0, None);
}
