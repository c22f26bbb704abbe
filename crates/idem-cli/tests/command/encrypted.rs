//! Keys of encrypted stores.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use idem_core::{
    AcquireOutcome, Checkpoint, IdempotencyStore as _, ReplayKind, Settlement, StoredBody, StoredResponse, Takeover,
};
use idem_encryption::{EncryptedStore, EncryptionConfig, Keys};
use idem_sqlite::SqliteStore;

use crate::{Console, File, HOUR, answer, complete, crash, idem, request};

const KEY: [u8; 32] = [0xab; 32];

fn encrypted(file: &File) -> EncryptedStore<SqliteStore> {
    EncryptedStore::new(Arc::new(file.store.clone()), EncryptionConfig::new(Keys::new(2, KEY)))
}

/// A file with the key, and who may read it.
fn keys(file: &File, mode: u32) -> PathBuf {
    keys_of(file, &format!("keys-{mode:o}"), mode, &format!("primary 2 {}\n", "ab".repeat(32)))
}

fn keys_of(file: &File, name: &str, mode: u32, text: &str) -> PathBuf {
    let path = file.folder().join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[tokio::test]
async fn answers_are_opened_and_sealed_with_the_keys() {
    let file = File::new().await;
    let store = encrypted(&file);
    let done = complete(&store, "done", StoredResponse::new(201, "secret")).await;
    let stuck = crash(&file.store, "stuck", Takeover::Unknown).await;
    let (private, open) = (keys(&file, 0o600), keys(&file, 0o640));
    let run = |keys: &PathBuf, arguments: &[&str]| {
        idem(&file.url, &[&["--keys", keys.to_str().unwrap()], arguments].concat())
    };
    let show = ["show", &done.id.to_string(), "--answer"];
    let sealed = idem(&file.url, &show).expect(0).stdout;
    assert!(sealed.contains("idem-sealed") && !sealed.contains("secret"), "{sealed}");
    assert!(run(&private, &show).expect(0).stdout.contains("secret"));
    let refused = run(&open, &show).expect(1);
    assert!(refused.stderr.contains("chmod 600") && !refused.stderr.contains("abab"), "{}", refused.stderr);

    let id = stuck.id.to_string();
    let resolve = |keys: Option<&PathBuf>, how: &[&str], code: i32| {
        let shown = run(&private, &["--json", "show", &id]).expect(0).json();
        let seen = shown[0]["version"].as_str().unwrap().to_owned();
        let arguments = [&["resolve", &*id, "--reason", "r", "--seen", &seen, "--yes"], how].concat();
        match keys {
            Some(keys) => run(keys, &arguments).expect(code),
            None => idem(&file.url, &arguments).expect(code),
        }
    };
    // No key is needed for what has no answer.
    resolve(None, &["--as", "unknown"], 0);
    let completed = ["--as", "completed", "--status", "201", "--header", "location: /paid"];
    let refused = resolve(None, &completed, 1);
    assert!(refused.stderr.contains("nothing was changed") && refused.stderr.contains("--keys"), "{}", refused.stderr);
    resolve(Some(&private), &completed, 0);
    let AcquireOutcome::Replay(replay) = answer(&store, &stuck).await else { panic!("it is resolved") };
    assert_eq!((&replay.response.headers[0].name[..], replay.response.status), (&b"location"[..], 201));
    let stored = format!("{:?}", file.store.peek(&stuck.id).await.unwrap().unwrap());
    assert!(stored.contains("StoredResponse") && !stored.contains("paid"), "{stored}");

    // An erasure needs no key, and its tombstone opens.
    idem(&file.url, &["erase", "--no-front", "--principal", "acme", "--reason", "GDPR-7", "--yes"]).expect(0);
    let AcquireOutcome::Replay(replay) = answer(&store, &done).await else { panic!("it does not run again") };
    assert_eq!((replay.response.status, replay.response.body), (201, StoredBody::NotRetained));
}

/// Records are encrypted since the console has started.
#[tokio::test]
async fn a_console_without_keys_writes_no_answer_into_an_encrypted_store() {
    let file = File::new().await;
    let stuck = crash(&file.store, "stuck", Takeover::Unknown).await;
    let console = Console::start(&file.url, &[]);
    complete(&encrypted(&file), "done", StoredResponse::new(201, "secret")).await;
    let unknown = console.resolve(&stuck.id, "as=outcome-unknown&reason=crashed");
    assert!(unknown.starts_with("HTTP/1.1 303"), "{unknown}");
    let refused = console.resolve(&stuck.id, "as=completed&status=201&body=plain&reason=r");
    assert!(!refused.starts_with("HTTP/1.1 303") && refused.contains("are encrypted"), "{refused}");
    let record = file.store.peek(&stuck.id).await.unwrap().unwrap();
    assert_eq!(record.replay().unwrap().kind, ReplayKind::OutcomeUnknown);
    assert!(!console.get(&format!("{}/repairs", console.secret), &[]).contains("completed"));
}

#[tokio::test]
async fn no_answer_is_sealed_with_a_key_that_no_record_proves() {
    let file = File::new().await;
    let store = encrypted(&file);
    let stuck = crash(&file.store, "stuck", Takeover::Unknown).await;
    let id = stuck.id.to_string();
    let (right, other) = ("ab".repeat(32), "cd".repeat(32));
    let text = [
        ("right", format!("primary 2 {right}")),
        ("other-bytes", format!("primary 2 {other}")),
        ("other-context", format!("primary 2 {right}\ncontext staging")),
        ("other-id", format!("primary 3 {right}\nold 2 {right}")),
    ];
    let run = |name: &str, arguments: &[&str]| {
        let text = &text.iter().find(|(known, _)| *known == name).unwrap().1;
        let path = keys_of(&file, name, 0o600, text);
        idem(&file.url, &[&["--keys", path.to_str().unwrap()], arguments].concat())
    };
    let resolve = |name: &str, how: &[&str]| {
        let shown = run("right", &["--json", "show", &id]).expect(0).json();
        let seen = shown[0]["version"].as_str().unwrap().to_owned();
        run(name, &[&["resolve", &*id, "--reason", "r", "--seen", &seen, "--yes"], how].concat())
    };
    resolve("other-bytes", &["--as", "unknown"]).expect(0);
    let completed = ["--as", "completed", "--status", "201", "--header", "location: /paid"];
    let before = file.store.peek(&stuck.id).await.unwrap();
    let refused = |name: &str, advice: &str| {
        let ran = resolve(name, &completed).expect(1);
        assert!(ran.stderr.contains("nothing was changed") && ran.stderr.contains(advice), "{name}: {}", ran.stderr);
        let console = run(name, &["console"]).expect(1);
        assert!(console.stderr.contains(advice) && console.stderr.contains("--read-only"), "{}", console.stderr);
    };
    // Nothing is sealed yet, so not even the right key is proven.
    refused("right", "--dangerous-unverified-key");
    complete(&store, "done", StoredResponse::new(201, "secret")).await;
    refused("other-bytes", "does not open under the key 2");
    refused("other-context", "does not open under the key 2");
    refused("other-id", "--dangerous-unverified-key");
    assert_eq!(file.store.peek(&stuck.id).await.unwrap(), before);
    resolve("right", &completed).expect(0);
    let AcquireOutcome::Replay(replay) = answer(&store, &stuck).await else { panic!("it is resolved") };
    assert_eq!(replay.response.status, 201);

    let rotated = crash(&file.store, "rotated", Takeover::Unknown).await;
    let seen = file.store.peek(&rotated.id).await.unwrap().unwrap().version().to_string();
    let keyed = |arguments: &[&str]| run("other-id", &[arguments, &["--reason", "r", "--yes"]].concat()).expect(0);
    let (id, how) = (rotated.id.to_string(), ["--dangerous-unverified-key", "--as", "failed", "--status", "402"]);
    keyed(&["resolve", &id, "--as", "unknown", "--seen", &seen]);
    let seen = file.store.peek(&rotated.id).await.unwrap().unwrap().version().to_string();
    keyed(&[&["resolve", &*id, "--seen", &*seen], &how[..]].concat());
}

/// An erasure needs no key, so a wrong one ends nothing.
#[tokio::test]
async fn a_record_that_does_not_open_is_erased_too() {
    let file = File::new().await;
    let store = encrypted(&file);
    let others = EncryptionConfig::new(Keys::new(7, [7; 32]));
    let other = EncryptedStore::new(Arc::new(file.store.clone()), others);
    complete(&store, "first", StoredResponse::new(201, "secret")).await;
    let lost = complete(&other, "lost", StoredResponse::new(201, "secret")).await;
    complete(&store, "last", StoredResponse::new(201, "secret")).await;
    let private = keys(&file, 0o600);
    let run = |arguments: &[&str]| idem(&file.url, &[&["--keys", private.to_str().unwrap()], arguments].concat());
    let shown = run(&["--json", "show", &lost.id.to_string(), "--answer"]).expect(0);
    assert!(shown.stderr.contains("under the key 7"), "{}", shown.stderr);
    assert_eq!(
        (&shown.json()[0]["opens"], &shown.json()[0]["answer"]["body"]),
        (&false.into(), &serde_json::Value::Null)
    );
    let erased = run(&["erase", "--no-front", "--principal", "acme", "--reason", "GDPR-7", "--yes"]).expect(0);
    assert!(erased.stdout.contains("3 erased, 0 not"), "{}", erased.stdout);
}

/// The key of its checkpoint was removed because it had leaked.
#[tokio::test]
async fn an_operation_whose_checkpoint_does_not_open_is_resolved() {
    let file = File::new().await;
    let store = encrypted(&file);
    complete(&store, "done", StoredResponse::new(201, "secret")).await;
    let leaked = EncryptedStore::new(Arc::new(file.store.clone()), EncryptionConfig::new(Keys::new(7, [7; 32])));
    let stuck = request("stuck", Takeover::Unknown, HOUR);
    let AcquireOutcome::Acquired(lease) = leaked.acquire(&stuck).await.unwrap() else { panic!("new") };
    let checkpoint = Checkpoint { name: "charged".into(), sequence: 1, data: "secret".into() };
    leaked.checkpoint(&lease, &checkpoint).await.unwrap();
    leaked.settle(&lease, &Settlement::OutcomeUnknown, HOUR).await.unwrap();
    let private = keys(&file, 0o600);
    let run = |arguments: &[&str]| idem(&file.url, &[&["--keys", private.to_str().unwrap()], arguments].concat());
    let id = stuck.id.to_string();
    let shown = run(&["--json", "show", &id]).expect(0);
    assert!(shown.stderr.contains("under the key 7") && !shown.stdout.contains("secret"), "{}", shown.stderr);
    let seen = shown.json()[0]["version"].as_str().unwrap().to_owned();
    let how = ["--as", "completed", "--status", "201", "--reason", "the bank has it", "--seen", &seen, "--yes"];
    run(&[&["resolve", &*id], &how[..]].concat()).expect(0);
    let AcquireOutcome::Replay(replay) = answer(&store, &stuck).await else { panic!("it is resolved") };
    assert_eq!(replay.response.status, 201);
}
