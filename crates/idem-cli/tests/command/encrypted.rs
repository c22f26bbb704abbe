//! Keys of encrypted stores.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use idem_core::{AcquireOutcome, IdempotencyStore as _, StoredBody, StoredResponse, Takeover};
use idem_encryption::{EncryptedStore, EncryptionConfig, Keys};
use idem_sqlite::SqliteStore;

use crate::{File, answer, complete, crash, idem};

const KEY: [u8; 32] = [0xab; 32];

fn encrypted(file: &File) -> EncryptedStore<SqliteStore> {
    EncryptedStore::new(Arc::new(file.store.clone()), EncryptionConfig::new(Keys::new(2, KEY)))
}

/// A file with the key, and who may read it.
fn keys(file: &File, mode: u32) -> PathBuf {
    let path = file.folder().join(format!("keys-{mode:o}"));
    std::fs::write(&path, format!("primary 2 {}\n", "ab".repeat(32))).unwrap();
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
    idem(&file.url, &["erase", "--principal", "acme", "--reason", "GDPR-7", "--yes"]).expect(0);
    let AcquireOutcome::Replay(replay) = answer(&store, &done).await else { panic!("it does not run again") };
    assert_eq!((replay.response.status, replay.response.body), (201, StoredBody::NotRetained));
}
