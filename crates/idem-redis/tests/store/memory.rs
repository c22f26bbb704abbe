//! What a settled record costs.

use idem_core::{HeaderField, IdempotencyStore as _, Settlement, StoredResponse};
use idem_testkit::fixture::{KEPT, request};

use crate::world::World;

fn usage(world: &World, key: &[u8]) -> i64 {
    world.ask(&[&b"MEMORY"[..], b"USAGE", key]).integer().unwrap()
}

#[tokio::test]
async fn a_settled_record_costs_little_more_than_its_answer() {
    let world = World::shared().await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    let field = |name: &'static str, value: &'static str| HeaderField { name: name.into(), value: value.into() };
    let headers = [field("content-type", "application/json"), field("location", "/v1/payments/4711")];
    let response = StoredResponse { headers: headers.clone().into(), ..StoredResponse::new(201, vec![b'x'; 512]) };
    world.store.settle(&lease, &Settlement::Completed(response), KEPT).await.unwrap();

    // Status, fingerprint and answer under the bare record id, with an end.
    let text = headers.iter().flat_map(|field| [field.name.as_ref(), b":", field.value.as_ref(), b"\n"]);
    let answer = [&[b'x'; 34][..], &text.collect::<Vec<_>>().concat(), &[b'x'; 512]].concat();
    world.ask(&[&b"SET"[..], request.id.as_bytes(), &answer, b"PX", b"600000"]);

    let (ours, smallest) = (usage(&world, world.key(&request.id).as_bytes()), usage(&world, request.id.as_bytes()));
    let ratio = ours as f64 / smallest as f64;
    println!(
        "a settled record with a body of 512 bytes: {ours} bytes, {ratio:.3} times the smallest string ({smallest})"
    );
    assert!(ratio <= 1.35, "{ratio}");
}
