//! What an erasure leaves in the file.

use crate::support::Database;
use idem_core::{
    Acquire, AcquireOutcome, Erase, EraseOutcome, IdempotencyStore, Operate, Origin, OwnerToken, RepairNote, Scope,
    Settlement, StoredResponse, erase,
};
use idem_testkit::fixture::{KEPT, request};

const PRINCIPAL: &str = "erin-the-canary";

/// Copies the write-ahead log to the file and empties it, then looks for a text in both.
async fn has(database: &Database, text: &str) -> bool {
    sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(database.store.pool()).await.unwrap();
    ["records.db", "records.db-wal"].iter().any(|name| {
        let bytes = std::fs::read(database.folder.path().join(name)).unwrap();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

#[tokio::test]
async fn what_is_erased_is_overwritten_in_the_file() {
    let database = Database::new().await;
    let mut erasures = Vec::new();
    // Answers that fit into a page, and answers that need many.
    for repeats in [1, 7, 40, 1_000, 2, 400, 1, 3] {
        let body = "body-of-the-canary ".repeat(repeats);
        let origin = Origin { namespace: "shop".into(), scope: Scope::new(PRINCIPAL, "POST /v1/payments") };
        let request = Acquire { origin, ..request() };
        let AcquireOutcome::Acquired(lease) = database.store.acquire(&request).await.unwrap() else { panic!("new") };
        let settlement = Settlement::Completed(StoredResponse::new(201, body));
        database.store.settle(&lease, &settlement, KEPT).await.unwrap();
        let note = RepairNote {
            action: OwnerToken::random(),
            record: request.id,
            actor: "an operator".into(),
            reason: format!("asked by {PRINCIPAL}"),
            resolution: "completed".into(),
            outcome: Some("resolved".into()),
        };
        database.store.note(&note).await.unwrap();
        let seen = database.store.peek(&request.id).await.unwrap().unwrap().version();
        erasures.push(Erase { id: request.id, action: OwnerToken::random(), seen, principal: Some(PRINCIPAL.into()) });
    }
    for text in [PRINCIPAL, "body-of-the-canary"] {
        assert!(has(&database, text).await, "{text}");
    }
    for by in &erasures {
        assert_eq!(erase(&database.store, by, "an operator", "asked for").await.unwrap(), EraseOutcome::Erased);
    }
    for text in [PRINCIPAL, "body-of-the-canary"] {
        assert!(!has(&database, text).await, "{text}");
    }
}
