//! What the pages show, and what their forms do.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::StatusCode;
use idem_core::{
    AcquireOutcome, CountPage, IdempotencyStore as _, Inspect, Inspection, Operate as _, OwnerToken, RecordFilter,
    RecordId, RecordPage, Resolution, Resolve, ResolveOutcome, ScanPosition, Settlement, StoreError, StoreErrorKind,
    StoredBody, StoredResponse,
};
use idem_sqlite::SqliteStore;
use idem_testkit::fixture::{KEPT, completed, failed, request, response, retryable};

use crate::support::World;

#[tokio::test]
async fn the_overview_has_what_is_stuck_and_counts_the_rest() {
    let world = World::new().await;
    let empty = world.get("bob", "").await;
    assert!(empty.status.is_success() && empty.text.contains("None: each operation has an answer"), "{}", empty.text);
    let world = World::new().await;
    for settlement in [completed(), completed(), failed(), retryable()] {
        world.settled(&settlement).await;
    }
    let (crashed, unknown) = (world.crashed().await, world.unknown().await);
    let page = world.get("bob", "").await.text;
    let (stuck, counts) = page.split_once("<h2>States</h2>").unwrap();
    for (id, state) in [(crashed, "abandoned"), (unknown, "outcome-unknown")] {
        let row = stuck.split("<tr>").find(|row| row.contains(&id.to_string())).expect("a row of each");
        assert!(row.contains(state) && row.contains("acme") && row.contains("POST /v1/payments"), "{row}");
    }
    assert_eq!(stuck.matches("/admin/idem/records/").count(), 2, "the others are not stuck");
    let count = |state: &str| {
        let row = counts.split("<tr>").find(|row| row.contains(&format!(">{state}<"))).unwrap();
        row.split_once("<td class=\"number\">").unwrap().1.split_once('<').unwrap().0.to_owned()
    };
    let counted = ["abandoned", "completed", "failed", "outcome-unknown", "retryable", "expired"].map(count);
    assert_eq!(counted, ["1", "2", "1", "1", "1", "0"]);
    assert!(counts.contains("6, 0.1 a minute; 4 without success so far"), "{counts}");
}

/// A request, its job and the consumer of its message have records of their own, and one trace.
#[tokio::test]
async fn a_record_leads_to_the_others_of_its_chain_in_their_order() {
    let world = World::new().await;
    let mut chain = Vec::new();
    for (digit, parent) in [('1', 'a'), ('1', 'b'), ('2', 'a'), ('1', 'c')] {
        let [trace, parent] = [(digit, 32), (parent, 16)].map(|(digit, count)| String::from(digit).repeat(count));
        let trace = Some(format!("00-{trace}-{parent}-01").parse().unwrap());
        let id = world.settled(&Settlement::Completed(StoredResponse { trace, ..response() })).await.to_string();
        world.wait(Duration::from_secs(1));
        if digit == '1' {
            chain.push(id);
        }
    }
    let page = world.get("bob", &format!("/records/{}", chain[2])).await.text;
    let (_, link) = page.split_once("href=\"/admin/idem/records?trace=").expect("a link");
    let trace = link.split_once('"').unwrap().0;
    assert_eq!(trace, "1".repeat(32));
    let page = world.get("bob", &format!("/records?trace={trace}")).await.text;
    let seen: Vec<_> = page.split("/admin/idem/records/").skip(1).map(|rest| &rest[..64]).collect();
    assert_eq!(seen, chain);
}

#[tokio::test]
async fn a_list_selects_and_goes_on_where_it_stopped() {
    let world = World::new().await;
    let mut ids = Vec::new();
    for _ in 0..300 {
        ids.push(world.settled(&completed()).await.to_string());
    }
    let failed = world.settled(&failed()).await.to_string();
    let (mut seen, mut path) = (Vec::new(), "/records?state=completed".to_owned());
    let mut pages = 0;
    loop {
        let page = world.get("bob", &path).await.text;
        seen.extend(ids.iter().filter(|id| page.contains(*id)).cloned());
        assert!(!page.contains(&failed), "another state");
        pages += 1;
        let Some((_, from)) = page.split_once("name=\"from\" value=\"") else { break };
        path = format!("/records?state=completed&from={}", from.split_once('"').unwrap().0);
    }
    seen.sort();
    ids.sort();
    assert_eq!(seen, ids, "each record is on one page");
    assert!(pages > 1, "a page has a part of them");
    for (query, expected) in [
        ("state=gone", "a state is one of"),
        ("older_than=soon", "looks like 5m"),
        ("trace=1", "32"),
        ("from=xy", "damaged"),
    ] {
        let answer = world.get("bob", &format!("/records?{query}")).await;
        assert!(answer.status == StatusCode::BAD_REQUEST && answer.text.contains(expected), "{query}: {}", answer.text);
    }
    let none = world.get("bob", "/records?principal=other&older_than=5m").await;
    assert!(none.text.contains("No record is selected among"), "{}", none.text);
}

#[tokio::test]
async fn a_crashed_run_is_explained_stopped_and_resolved() {
    let world = World::new().await;
    let id = world.crashed().await;
    let page = world.get("ann", &format!("/records/{id}")).await.text;
    for part in
        ["it is not known whether the operation took effect", "over for 1m", "charged", "acme", "outcome-unknown"]
    {
        assert!(page.contains(part), "{part}: {page}");
    }
    let form = world.form("ann", &id).await;
    assert!(!page.contains("value=\"completed\""), "its process may only have stalled");
    let stopped = world.post("ann", &form, &[("as", "outcome-unknown"), ("reason", "it crashed")]).await;
    assert_eq!(stopped.status, StatusCode::SEE_OTHER, "{}", stopped.text);
    assert_eq!(stopped.headers["location"], format!("/admin/idem/records/{id}"));
    let form = world.form("ann", &id).await;
    let fields = [
        ("as", "completed"),
        ("reason", "the bank has it: ÄÖ"),
        ("status", "201"),
        ("content_type", "application/json"),
        ("body", "{\"a\":1}\r\n"),
    ];
    let resolved = world.post("ann", &form, &fields).await;
    assert_eq!(resolved.status, StatusCode::SEE_OTHER, "{}", resolved.text);
    let again = world.post("ann", &form, &fields).await;
    assert_eq!(again.status, StatusCode::SEE_OTHER, "a form that is sent twice: {}", again.text);
    let outcome = world.acquire_again(&idem_core::Acquire { id, ..request() }).await;
    let AcquireOutcome::Replay(replay) = outcome else { panic!("{outcome:?}") };
    assert_eq!((replay.response.status, &*replay.response.headers[0].value), (201, &b"application/json"[..]));
    assert_eq!(replay.response.body, StoredBody::Retained("{\"a\":1}\n".into()));
    let repairs = world.get("bob", "/repairs").await.text;
    assert_eq!(
        repairs.matches(&id.to_string()).count(),
        2,
        "one for each form, not for each time that it was sent: {repairs}"
    );
    assert!(repairs.contains("the bank has it: ÄÖ") && repairs.contains("ann"), "{repairs}");
    let page = world.get("ann", &format!("/records/{id}")).await.text;
    assert!(page.contains("the bank has it: ÄÖ") && !page.contains("<form class=\"resolve\""), "{page}");
}

#[tokio::test]
async fn a_form_of_a_record_that_has_changed_does_nothing() {
    let world = World::new().await;
    let id = world.unknown().await;
    let form = world.form("ann", &id).await;
    let resolution = Resolution::FailedTerminal(StoredResponse::new(402, "by another operator"));
    let seen = world.version(&id).await.parse().unwrap();
    let by = Resolve { id, action: OwnerToken::random(), seen, resolution, retention: KEPT };
    assert_eq!(world.store.resolve(&by).await.unwrap(), ResolveOutcome::Resolved);
    let late = world.post("ann", &form, &[("as", "completed"), ("reason", "r"), ("status", "201")]).await;
    assert_eq!(late.status, StatusCode::CONFLICT);
    assert!(late.text.contains("look again"), "{}", late.text);
    assert!(
        world.get("ann", "/repairs").await.text.contains("No record was ever repaired"),
        "an old form leaves no note"
    );
    let record = world.store.peek(&id).await.unwrap().unwrap();
    assert_eq!(record.owner, by.action, "the record is that of the other operator");
}

#[tokio::test]
async fn what_does_not_fit_is_refused_and_changes_nothing() {
    let world = World::new().await;
    let id = world.unknown().await;
    let (form, before) = (world.form("ann", &id).await, world.version(&id).await);
    for (fields, expected) in [
        (&[("as", "completed"), ("status", "201"), ("reason", " ")][..], "the reason is empty"),
        (&[("as", "completed"), ("reason", "r")], "needs a status"),
        (&[("as", "completed"), ("reason", "r"), ("status", "abc")], "needs a status"),
        (&[("as", "completed"), ("reason", "r"), ("body", "b")], "needs a status"),
        (&[("as", "completed"), ("reason", "r"), ("status", "99")], "200 to 599"),
        (&[("as", "failed"), ("reason", "r"), ("status", "200")], "from 400 on"),
        (&[("as", "retryable"), ("reason", "r"), ("status", "503"), ("retry_after", "soon")], "30s or 5m"),
        (&[("as", "failed"), ("reason", "r"), ("status", "402"), ("retry_after", "1s")], "may run again"),
        (
            &[("as", "completed"), ("reason", "r"), ("status", "201"), ("content_type", "a\r\nb: c")],
            "no value of a header",
        ),
        (&[("as", "completed"), ("reason", "r"), ("status", "201"), ("seen", "1")], "no version"),
        (&[("as", "completed"), ("status", "201"), ("reason", &"r".repeat(4_097))], "more than 4096 bytes"),
        (&[("as", "gone"), ("reason", "r")], "say how the operation ended"),
    ] {
        let answer = world.post("ann", &form, fields).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{fields:?}: {}", answer.text);
        // What was entered is not lost.
        let typed =
            fields.iter().filter(|(name, value)| matches!(*name, "reason" | "status") && !value.trim().is_empty());
        typed.for_each(|(_, value)| assert!(answer.text.contains(value), "{value}: {}", answer.text));
        assert!(
            answer.text.contains(expected) && answer.text.contains("Nothing was changed"),
            "{fields:?}: {}",
            answer.text
        );
    }
    assert_eq!(world.version(&id).await, before);
    assert!(world.get("bob", "/repairs").await.text.contains("No record was ever repaired"));
    let old = world.form("ann", &id).await;
    let again = [("as", "retryable"), ("reason", "r"), ("status", "503"), ("retry_after", "90s")];
    assert_eq!(world.post("ann", &form, &again).await.status, StatusCode::SEE_OTHER);
    let waits = world.get("ann", &format!("/records/{id}")).await.text;
    assert!(waits.contains("ends in 1m 30s"), "{waits}");
    // What is wrong in a form of an earlier version is not shown over the version of now.
    let late = [("as", "completed"), ("reason", "r"), ("status", "abc")];
    let answer = world.post("ann", &old, &late).await;
    assert_eq!(answer.status, StatusCode::CONFLICT, "{}", answer.text);
    assert!(!answer.text.contains("name=\"seen\""), "{}", answer.text);
}

#[tokio::test]
async fn an_answer_is_masked_until_it_is_asked_for() {
    let world = World::new().await;
    let mut response = StoredResponse::new(201, "secret body");
    response.headers = [idem_core::HeaderField { name: "x-card".into(), value: "secret value".into() }].into();
    let id = world.settled(&Settlement::Completed(response)).await;
    let page = |user, query| {
        let path = format!("/records/{id}{query}");
        let world = &world;
        async move { world.get(user, &path).await.text.replace("hold secrets", "") }
    };
    for masked in [page("ann", "").await, page("bob", "").await, page("bob", "?answer=shown").await] {
        assert!(masked.contains("x-card") && masked.contains("11 bytes") && !masked.contains("secret "), "{masked}");
    }
    let shown = page("ann", "?answer=shown").await;
    assert!(shown.contains("secret value") && shown.contains("secret body"), "{shown}");
}

#[tokio::test]
async fn a_live_run_cannot_be_resolved() {
    let world = World::new().await;
    let lease = world.lease(&request()).await;
    let page = world.get("ann", &format!("/records/{}", lease.id)).await.text;
    assert!(page.contains("A process runs the operation") && !page.contains("<form class=\"resolve\""), "{page}");
    world.wait(Duration::from_secs(1));
    let missing = world.get("ann", &format!("/records/{}", idem_testkit::fixture::fresh_id())).await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert_eq!(world.get("ann", "/records/abc").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_form_with_another_content_is_another_repair() {
    let world = World::new().await;
    let id = world.crashed().await;
    let form = world.form("ann", &id).await;
    // It is refused, since the process may only have stalled. The operator goes back and chooses the other state.
    let early = world.post("ann", &form, &[("as", "completed"), ("reason", "too early"), ("status", "201")]).await;
    assert!(early.status == StatusCode::CONFLICT && early.text.contains("Mark it as unknown first"), "{}", early.text);
    let stopped = world.post("ann", &form, &[("as", "outcome-unknown"), ("reason", "it crashed")]).await;
    assert_eq!(stopped.status, StatusCode::SEE_OTHER, "{}", stopped.text);
    let repairs = world.store.repairs(NonZeroU32::MAX).await.unwrap();
    let noted: Vec<_> = repairs.iter().map(|repair| (&*repair.note.reason, repair.note.outcome.as_deref())).collect();
    assert_eq!(noted, [("it crashed", Some("resolved")), ("too early", Some("refused: not unknown yet"))]);
    let page = world.get("ann", &format!("/records/{id}")).await.text;
    assert!(page.contains("became outcome-unknown, as ann had asked"), "{page}");
}

/// A store that is slow for large parts, and away now and then.
#[derive(Debug)]
struct Flaky(Arc<SqliteStore>, AtomicU32);

impl Flaky {
    fn admit(&self, limit: NonZeroU32) -> Result<(), StoreError> {
        let call = self.1.fetch_add(1, Ordering::Relaxed);
        match (limit.get() > 60, call % 3) {
            (true, _) => Err(StoreError::new(StoreErrorKind::Timeout, "slow")),
            (false, 1) => Err(StoreError::new(StoreErrorKind::Unavailable, "away")),
            (false, _) => Ok(()),
        }
    }
}

#[async_trait]
impl Inspect for Flaky {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        self.0.inspect(id).await
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        self.admit(limit)?;
        self.0.list(filter, from, limit).await
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        self.admit(limit)?;
        self.0.count(from, limit).await
    }
}

#[tokio::test]
async fn a_survey_survives_a_store_that_is_slow_and_away_now_and_then() {
    let world = World::new().await;
    let stuck = world.crashed().await;
    for _ in 0..100 {
        world.settled(&completed()).await;
    }
    let flaky = world.inspected_by(Arc::new(Flaky(world.store.clone(), AtomicU32::new(0))));
    let deadline = Instant::now() + Duration::from_secs(60);
    let page = loop {
        let page = flaky.get("ann", "").await.text;
        if page.contains("<h2>States</h2>") {
            break page;
        }
        assert!(Instant::now() < deadline && !page.contains("could not be counted"), "{page}");
    };
    assert!(page.contains(">100</td>") && page.contains(&stuck.to_string()), "{page}");
}
