//! `idem erase`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, Inspect as _, Operate as _, Scope, StoredBody, StoredResponse, Takeover,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_schemas::Schema;

use crate::{File, HOUR, answer, complete, crash, idem, request};

/// The body that a repeat gets.
async fn body(store: &dyn IdempotencyStore, request: &Acquire) -> StoredBody {
    match answer(store, request).await {
        AcquireOutcome::Replay(replay) => replay.response.body,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_a_person_left_is_erased_but_for_what_may_still_run() {
    let file = File::new().await;
    let done = complete(&file.store, "done", StoredResponse::new(201, "secret")).await;
    let other = Acquire {
        origin: idem_core::Origin { namespace: "shop".into(), scope: Scope::new("beta", "POST /v1/payments") },
        ..request("other", Takeover::Rerun, HOUR)
    };
    let AcquireOutcome::Acquired(lease) = file.store.acquire(&other).await.unwrap() else { panic!("new") };
    let settlement = idem_core::Settlement::Completed(StoredResponse::new(201, "theirs"));
    file.store.settle(&lease, &settlement, HOUR).await.unwrap();
    let stuck = crash(&file.store, "stuck", Takeover::Rerun).await;
    let running = request("running", Takeover::Rerun, HOUR);
    file.store.acquire(&running).await.unwrap();
    let erase = |more: &[&str]| idem(&file.url, &[&["erase", "--no-front", "--reason", "GDPR-7"], more].concat());
    // Nothing happens without a yes, and the reason stays.
    for (arguments, code, advice) in [
        (vec!["--principal", "acme"], 1, "--yes"),
        (vec!["--principal", "acme", "--yes", "--reason", "acme asked"], 1, "names the principal"),
        (vec!["--principal", "", "--yes"], 1, "empty"),
        (vec!["--principal", "nobody", "--yes"], 5, "no such record"),
        (vec!["--yes"], 2, "ID"),
    ] {
        let arguments: Vec<&str> =
            if arguments.contains(&"--reason") { [&["erase"][..], &arguments].concat() } else { arguments };
        let ran = match arguments.first() {
            Some(&"erase") => idem(&file.url, &arguments).expect(code),
            _ => erase(&arguments).expect(code),
        };
        assert!(ran.stderr.contains(advice), "{arguments:?}: {}", ran.stderr);
    }
    let planned = erase(&["--principal", "acme", "--dry-run"]).expect(5).stdout;
    assert!(planned.contains("1 would be erased, 2 not"), "{planned}");
    assert_eq!(body(&file.store, &done).await, StoredResponse::new(201, "secret").body);
    let erased = erase(&["--principal", "acme", "--namespace", "shop", "--yes"]).expect(5).stdout;
    assert!(erased.contains("1 erased, 2 not"), "{erased}");
    assert!(erased.contains("a process runs the operation") && erased.contains("resolve it first"), "{erased}");
    assert_eq!(body(&file.store, &done).await, StoredBody::NotRetained);
    assert_eq!(body(&file.store, &other).await, StoredResponse::new(201, "theirs").body);
    let shown = idem(&file.url, &["--json", "show", &done.id.to_string()]).expect(0).json();
    assert_eq!((&shown[0]["principal"], &shown[0]["status"]), (&"".into(), &201.into()));
    assert!(idem(&file.url, &["show", &done.id.to_string()]).expect(0).stdout.contains("410"));
    // What is stuck can be erased once it is settled.
    let seen =
        |id: &str| idem(&file.url, &["--json", "show", id]).expect(0).json()[0]["version"].as_str().unwrap().to_owned();
    let id = stuck.id.to_string();
    for how in [&["--as", "unknown"][..], &["--as", "failed", "--status", "402"]] {
        let version = seen(&id);
        let fixed = ["resolve", &id, "--reason", "acme crashed", "--yes", "--seen", &version];
        idem(&file.url, &[&fixed[..], how].concat()).expect(0);
    }
    // The record knows its principal.
    let named = idem(&file.url, &["erase", "--no-front", &id, "--reason", "acme asked", "--yes"]).expect(1);
    assert!(named.stderr.contains("names the principal"), "{}", named.stderr);
    let one = erase(&["--json", &id, "--yes"]).expect(0).json();
    assert_eq!((&one[0]["erased"], &one[0]["id"]), (&true.into(), &(&*id).into()));
    let notes = file.store.repairs(NonZeroU32::MAX).await.unwrap();
    assert!(notes.iter().all(|repair| !format!("{:?}", repair.note).contains("acme")), "{notes:?}");
    let listed = idem(&file.url, &["repairs"]).expect(0).stdout;
    assert!(listed.contains("erased  erased  by tester: GDPR-7") && listed.contains("(erased) crashed"), "{listed}");
    assert_eq!(idem(&file.url, &["list", "--principal", "acme"]).expect(0).stdout.lines().count(), 1);
}

#[tokio::test]
async fn the_copy_in_redis_goes_too_and_nothing_is_erased_without_it() {
    let (schema, prefix) = (Schema::new(), format!("cli-{}:", std::process::id()));
    let url = idem_servers::postgres_url();
    let durable = Arc::new(PostgresStore::open(PostgresConfig::new(&url).schema(&schema.name)).await.unwrap());
    let config = RedisConfig::new(idem_servers::redis_url()).key_prefix(&prefix).timeout(Duration::from_secs(5));
    let fast = Arc::new(RedisFastStore::new(config).unwrap());
    let config = HybridConfig::new().patience(Duration::from_secs(5));
    let hybrid = HybridStore::new(durable.clone(), fast, config);
    let done = complete(&hybrid, "done", StoredResponse::new(201, "secret")).await;
    // Until a repeat is answered by the copy.
    while hybrid.metrics().fast_replays == 0 {
        assert_eq!(body(&hybrid, &done).await, StoredResponse::new(201, "secret").body);
    }
    let erase = |more: &[&str]| {
        let options = ["--schema", &schema.name, "erase", "--principal", "acme", "--reason", "GDPR-7", "--yes"];
        idem(&url, &[&options[..], more].concat())
    };
    let front = idem_servers::redis_url();
    // The store does not know whether there is a Redis in front of it.
    let silent = erase(&[]).expect(1);
    assert!(silent.stderr.contains("--front") && silent.stderr.contains("--no-front"), "{}", silent.stderr);
    let both = erase(&["--front", &front, "--no-front"]).expect(1);
    assert!(both.stderr.contains("contradicts"), "{}", both.stderr);
    let away = erase(&["--key-prefix", &prefix, "--front", "redis://127.0.0.1:1"]).expect(1);
    assert!(away.stderr.contains("may keep a copy; nothing was erased"), "{}", away.stderr);
    assert!(away.stderr.contains("0 records were erased before this error"), "{}", away.stderr);
    let found = durable.inspect(&done.id).await.unwrap();
    assert_eq!(found.origin.unwrap().scope.principal(), Some("acme"));
    let erased = erase(&["--key-prefix", &prefix, "--front", &front]).expect(0).stdout;
    assert!(erased.contains("1 of 1 records had a copy"), "{erased}");
    assert_eq!(body(&hybrid, &done).await, StoredBody::NotRetained, "by the copy");
    assert_eq!(body(&*durable, &done).await, StoredBody::NotRetained);
    assert_eq!(durable.inspect(&done.id).await.unwrap().origin.unwrap().scope.principal(), Some(""));
    // Under another prefix there is no copy, and the command cannot know why.
    complete(&hybrid, "other", StoredResponse::new(201, "secret")).await;
    let elsewhere = erase(&["--key-prefix", "elsewhere:", "--front", &front]).expect(0).stdout;
    assert!(elsewhere.contains("not erased: copies in another Redis, or under another --key-prefix"), "{elsewhere}");
    complete(&*durable, "last", StoredResponse::new(201, "secret")).await;
    let alone = erase(&["--no-front"]).expect(0).stdout;
    assert!(alone.contains("1 erased, 0 not\nnot erased: copies in a Redis in front"), "{alone}");
}

#[tokio::test]
async fn a_record_of_redis_is_erased_by_its_id() {
    use idem_redis::RedisStore;
    let (url, prefix) = (idem_servers::redis_url(), format!("cli-erase-{}:", std::process::id()));
    let store = RedisStore::open(RedisConfig::new(&url).key_prefix(&prefix)).await.unwrap();
    let done = complete(&store, "done", StoredResponse::new(201, "secret")).await;
    let run = |arguments: &[&str]| idem(&url, &[&["--key-prefix", &*prefix], arguments].concat());
    let erase = ["erase", "--reason", "GDPR-7", "--yes"];
    let by_principal = run(&[&erase[..], &["--principal", "acme"]].concat()).expect(1);
    assert!(by_principal.stderr.contains("does not keep"), "{}", by_principal.stderr);
    let front = run(&[&["--front", &*url], &erase[..], &[&done.id.to_string()]].concat()).expect(1);
    assert!(front.stderr.contains("for a store in Postgres, MariaDB or SQLite"), "{}", front.stderr);
    run(&[&erase[..], &[&done.id.to_string()]].concat()).expect(0);
    assert_eq!(body(&store, &done).await, StoredBody::NotRetained);
}

/// A damaged record ends no erasure: it is named, and the others are erased.
#[tokio::test]
async fn a_record_that_cannot_be_read_is_named_and_the_others_are_erased() {
    let file = File::new().await;
    let [first, damaged, last] = [
        complete(&file.store, "first", StoredResponse::new(201, "secret")).await,
        complete(&file.store, "damaged", StoredResponse::new(201, "secret")).await,
        complete(&file.store, "last", StoredResponse::new(201, "secret")).await,
    ];
    let set = |column: &str, value: &str| {
        let sql = format!("UPDATE idem_records SET {column} = {value} WHERE id = x'{}'", damaged.id);
        let pool = sqlx::SqlitePool::connect_lazy(&file.url).unwrap();
        async move { sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&pool).await.unwrap() }
    };
    // It is listed, but its header fields cannot be decoded.
    set("headers", "x'ff'").await;
    let erase = ["erase", "--no-front", "--principal", "acme", "--reason", "GDPR-7", "--yes"];
    let ran = idem(&file.url, &erase).expect(5);
    assert!(ran.stdout.contains("2 erased, 1 not"), "{}", ran.stdout);
    assert!(ran.stdout.contains(&format!("{}  it cannot be read, and is not erased", damaged.id)), "{}", ran.stdout);
    for request in [&first, &last] {
        assert_eq!(body(&file.store, request).await, StoredBody::NotRetained);
    }
    // A newer version wrote it, so that not even a listing reads it.
    set("format", "9").await;
    let ran = idem(&file.url, &erase).expect(5);
    assert!(ran.stderr.contains("1 records cannot be read, and may be of this principal"), "{}", ran.stderr);
}
