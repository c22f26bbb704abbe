//! Whatever is stored comes back byte for byte.

use bytes::Bytes;
use idem_core::{
    AcquireOutcome, Checkpoint, HeaderField, IdempotencyStore as _, OwnerOutcome, Settlement, StoredBody,
    StoredResponse,
};
use idem_testkit::fixture::{checkpoint, repeat_of, request};

use crate::world::World;

async fn survives(world: &World, response: StoredResponse) {
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    let settlement = Settlement::Completed(response.clone());
    assert_eq!(world.settle(&lease, &settlement).await.unwrap(), OwnerOutcome::Applied);
    // The repeat compares every byte with the stored record.
    assert_eq!(world.settle(&lease, &settlement).await.unwrap(), OwnerOutcome::Applied);
    match world.store.acquire(&repeat_of(&request)).await.unwrap() {
        AcquireOutcome::Replay(replay) => assert!(replay.response == response, "{:?}", replay.response),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn bodies_of_any_size_and_bytes_survive() {
    let world = World::shared().await;
    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    let mebibyte = every_byte.iter().copied().cycle().take(1 << 20).collect::<Vec<u8>>();
    for body in [Bytes::new(), Bytes::from(every_byte), Bytes::from(mebibyte), Bytes::from(vec![0; 1 << 20])] {
        survives(&world, StoredResponse::new(200, body)).await;
    }
    survives(&world, StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(200, "") }).await;
}

#[tokio::test]
async fn ten_thousand_odd_header_fields_survive() {
    let world = World::shared().await;
    let value = |number: usize| -> Vec<u8> {
        let length = number % 97;
        (0..length).map(|at| u8::try_from((number * 31 + at * 7) % 256).unwrap()).collect()
    };
    let field = |number: usize| HeaderField {
        name: format!("x-{}", number % 1_000).into_bytes().into(),
        value: value(number).into(),
    };
    let headers: Vec<HeaderField> = (0..10_000).map(field).collect();
    survives(&world, StoredResponse { headers: headers.into(), ..StoredResponse::new(201, "body") }).await;
}

#[tokio::test]
async fn a_settlement_that_differs_in_one_byte_is_another_one() {
    let world = World::shared().await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    let response = |body: &'static [u8]| Settlement::Completed(StoredResponse::new(200, body));
    world.settle(&lease, &response(b"a\0b")).await.unwrap();
    assert_eq!(world.settle(&lease, &response(b"a\0c")).await.unwrap(), OwnerOutcome::LeaseLost);
    let tombstone = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(200, "") };
    assert_eq!(world.settle(&lease, &Settlement::Completed(tombstone)).await.unwrap(), OwnerOutcome::LeaseLost);
}

/// A duplicate replaces the record that it has read only if it is still the same. Changes within a record's first millisecond
/// have the same time.
#[tokio::test]
async fn no_two_versions_of_a_record_begin_alike() {
    let world = World::shared().await;
    for _ in 0..100 {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        let head = || world.stored(&request.id)[..92].to_vec();
        let mut heads = vec![head()];
        for sequence in 1..4 {
            let checkpoint = Checkpoint { sequence, ..checkpoint("charged") };
            assert_eq!(world.store.checkpoint(&lease, &checkpoint).await.unwrap(), OwnerOutcome::Applied);
            heads.push(head());
        }
        let versions = heads.len();
        heads.sort();
        heads.dedup();
        assert_eq!(heads.len(), versions);
    }
}
