//! Attacks on the console: forged forms, markup in what clients choose, missing permissions, records of others.

use axum::body::Body;
use http::{Request, StatusCode};
use idem_core::{
    Acquire, Checkpoint, HeaderField, IdempotencyStore as _, Origin, RecordId, Scope, Settlement, StoredResponse,
    Takeover,
};
use idem_testkit::fixture::{KEPT, LEASE, request};

use crate::support::World;

/// What an operator enters to resolve a record.
const FIELDS: [(&str, &str); 3] = [("as", "completed"), ("reason", "r"), ("status", "201")];

/// Each page, the one of this record among them.
fn paths(id: &RecordId) -> Vec<String> {
    let pages = ["", "/records", "/records?state=completed", "/repairs"].map(str::to_owned);
    pages.into_iter().chain(["", "?answer=shown"].map(|query| format!("/records/{id}{query}"))).collect()
}

#[tokio::test]
async fn without_permission_there_is_no_page_and_no_repair() {
    let world = World::new().await;
    let id = world.unknown().await;
    let (form, before) = (world.form("ann", &id).await, world.version(&id).await);
    for user in ["", "mallory"] {
        for path in paths(&id) {
            let answer = world.get(user, &path).await;
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{path}");
            assert!(!answer.text.contains("acme") && !answer.text.contains(&id.to_string()), "{path}: {}", answer.text);
        }
        assert_eq!(world.post(user, &form, &FIELDS).await.status, StatusCode::FORBIDDEN);
    }
    let reader = world.get("bob", &format!("/records/{id}")).await.text;
    assert!(reader.contains("You may not resolve it") && !reader.contains("<form class=\"resolve\""), "{reader}");
    assert_eq!(world.post("bob", &form, &FIELDS).await.status, StatusCode::FORBIDDEN);
    let crashed = world.crashed().await;
    let stopping = world.form("stopper", &crashed).await;
    let stopped = world.post("stopper", &stopping, &[("as", "outcome-unknown"), ("reason", "r")]).await;
    assert_eq!(stopped.status, StatusCode::SEE_OTHER, "{}", stopped.text);
    let mut more = stopping.clone();
    let seen = world.version(&crashed).await;
    more.fields.retain(|(name, _)| name != "seen");
    more.fields.push(("seen".to_owned(), seen));
    assert_eq!(world.post("stopper", &more, &FIELDS).await.status, StatusCode::FORBIDDEN, "not permitted for it");
    assert_eq!(world.version(&id).await, before);
}

#[tokio::test]
async fn a_forged_form_is_refused() {
    let world = World::new().await;
    let (id, other) = (world.unknown().await, world.unknown().await);
    let (form, before) = (world.form("ann", &id).await, world.version(&id).await);
    let token = |form: &crate::support::Form| {
        form.fields.iter().find(|(name, _)| name == "token").map(|(_, token)| token.clone()).unwrap()
    };
    let of_another_record = token(&world.form("ann", &other).await);
    let of_another_actor = token(&world.form("<script>", &id).await);
    for forged in ["", "00", &of_another_record, &of_another_actor] {
        let answer = world.post("ann", &form, &[&FIELDS[..], &[("token", forged)]].concat()).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{forged}");
    }
    for site in ["cross-site", "same-site"] {
        let answer = world.post_with("ann", &form, &FIELDS, &[("sec-fetch-site", site)]).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{site}");
    }
    // A link or an image cannot send a form.
    let query = form.fields.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&");
    let link = Request::get(format!("{}?{query}&as=completed&reason=r&status=201", form.path)).header("x-user", "ann");
    assert_eq!(world.send(link.body(Body::empty()).unwrap()).await.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(world.version(&id).await, before);
    // A console of another process, or one that was started again, does not know the token.
    let restarted = World::new().await;
    assert_eq!(restarted.post("ann", &form, &FIELDS).await.status, StatusCode::FORBIDDEN);
    let own = world.post_with("ann", &form, &FIELDS, &[("sec-fetch-site", "same-origin")]).await;
    assert_eq!(own.status, StatusCode::SEE_OTHER, "{}", own.text);
}

#[tokio::test]
async fn markup_in_what_clients_choose_is_text() {
    const MARKUP: &str = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>\u{202e}";
    let world = World::new().await;
    let origin = Origin { namespace: MARKUP.into(), scope: Scope::new(MARKUP, MARKUP) };
    let first = Acquire { origin: origin.clone(), takeover: Takeover::Unknown, ..request() };
    let lease = world.lease(&first).await;
    let point = Checkpoint { sequence: 1, name: MARKUP.into(), data: MARKUP.as_bytes().into() };
    world.store.checkpoint(&lease, &point).await.unwrap();
    world.wait(LEASE * 2);
    let mut response = StoredResponse::new(201, MARKUP);
    response.headers = [HeaderField { name: MARKUP.into(), value: MARKUP.into() }].into();
    let settled = Acquire { origin, ..request() };
    let other = world.lease(&settled).await;
    world.store.settle(&other, &Settlement::Completed(response), KEPT).await.unwrap();
    let form = world.form("<script>", &lease.id).await;
    let resolved = world.post("<script>", &form, &[("as", "outcome-unknown"), ("reason", MARKUP)]).await;
    assert_eq!(resolved.status, StatusCode::SEE_OTHER, "{}", resolved.text);
    let entered = "%22%27%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E";
    let mut paths = [paths(&lease.id), paths(&other.id)].concat();
    paths.extend(
        ["principal", "operation", "namespace", "older_than", "state", "trace", "from", "abandoned"]
            .map(|field| format!("/records?{field}={entered}")),
    );
    let mut shown = 0;
    for path in paths {
        let answer = world.get("<script>", &path).await;
        for markup in ["<script", "<img", "\u{202e}", "\"'>"] {
            assert!(!answer.text.contains(markup), "{path}: {markup} in {}", answer.text);
        }
        shown += answer.text.matches("&lt;script&gt;").count();
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
        assert!(!policy.contains("script-src") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.headers["cache-control"], "no-store");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
    }
    assert!(shown > 20, "the markup is shown as text: {shown}");
}

#[tokio::test]
async fn records_of_another_tenant_do_not_exist() {
    let world = World::new().await;
    let id = world.unknown().await;
    let form = world.form("ann", &id).await;
    let own = world.get("acme", &format!("/records/{id}")).await;
    assert!(own.status.is_success() && own.text.contains("acme"), "{}", own.text);
    let unknown = world.get("other", &format!("/records/{}", idem_testkit::fixture::fresh_id())).await;
    for path in ["", "?answer=shown"] {
        let answer = world.get("other", &format!("/records/{id}{path}")).await;
        assert_eq!((answer.status, answer.text), (unknown.status, unknown.text.clone()), "as one that does not exist");
    }
    for path in ["", "/records", "/records?principal=acme", "/records?principal=acme&namespace=idem-testkit"] {
        let answer = world.get("other", path).await;
        assert!(answer.status.is_success() && !answer.text.contains(&id.to_string()), "{path}: {}", answer.text);
        assert!(!answer.text.contains("<h2>States</h2>"), "counts are of all tenants");
    }
    assert!(world.get("acme", "/records").await.text.contains(&id.to_string()));
    for _ in 0..120 {
        world.unknown().await;
    }
    // Among many stuck records of others, a tenant still finds its own, and learns nothing of the others.
    let origin = Origin { namespace: "idem-testkit".into(), scope: Scope::new("other", "POST /") };
    let lease = world.lease(&Acquire { origin, ..request() }).await;
    world.store.settle(&lease, &Settlement::OutcomeUnknown, KEPT).await.unwrap();
    let overview = world.get("other", "").await.text;
    assert!(overview.contains(&lease.id.to_string()), "{overview}");
    assert_eq!(overview.matches("/admin/idem/records/").count(), 1, "{overview}");
    let none = world.get("other", "/records?operation=zzz").await.text;
    assert!(!none.contains("among") && !none.contains(" %"), "{none}");
    let first = world.get("acme", "/records").await.text;
    let link = |page: &str| Some(page.split_once("name=\"from\" value=\"")?.1.split_once('"')?.0.to_owned());
    let next = link(&first).expect("more than one page");
    let ids = first.split("/admin/idem/records/").skip(1).map(|rest| &rest[..64]);
    assert!(ids.clone().count() > 1 && ids.clone().all(|id| !next.contains(&id[..8])), "the link has no id: {next}");
    assert_eq!(world.get("acme", &format!("/records?from={next}")).await.status, StatusCode::OK);
    for (user, from) in [("other", &*next), ("ann", &*next), ("other", &*"00".repeat(32))] {
        let answer = world.get(user, &format!("/records?from={from}")).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{user}: {}", answer.text);
    }
    assert_eq!(world.get("other", "/repairs").await.status, StatusCode::FORBIDDEN);
    let before = world.version(&id).await;
    // With a token for the record, which no page gives.
    let foreign = world.form("acme", &id).await;
    for stolen in [&form, &foreign] {
        assert_eq!(world.post("other", stolen, &FIELDS).await.status, StatusCode::FORBIDDEN);
    }
    assert_eq!(world.version(&id).await, before);
}
