//! What a settled record costs.

use idem_core::{HeaderField, IdempotencyStore as _, Settlement, StoredResponse};
use idem_servers::Reply;
use idem_testkit::fixture::{KEPT, request};

use crate::world::World;

fn usage(world: &World, key: &[u8]) -> i64 {
    world.ask(&[&b"MEMORY"[..], b"USAGE", key, b"SAMPLES", b"0"]).integer().unwrap()
}

#[tokio::test]
async fn a_settled_record_costs_little_more_than_its_fields() {
    let world = World::shared().await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    let field = |name: &'static str, value: &'static str| HeaderField { name: name.into(), value: value.into() };
    let headers = [field("content-type", "application/json"), field("location", "/v1/payments/4711")];
    let response = StoredResponse { headers: headers.into(), ..StoredResponse::new(201, vec![b'x'; 512]) };
    world.store.settle(&lease, &Settlement::Completed(response), KEPT).await.unwrap();

    // The same values under the shortest names there are, in a hash whose key is the bare record id, with an end.
    let stored = world.ask(&["HGETALL", &world.key(&request.id)]);
    let values = stored.items().chunks(2).map(|pair| match &pair[1] {
        Reply::Bytes(value) => value.clone(),
        other => panic!("{other:?}"),
    });
    let mut words = vec![b"HSET".to_vec(), request.id.as_bytes().to_vec()];
    for (value, name) in values.zip(b'a'..) {
        words.extend([vec![name], value]);
    }
    world.ask(&words);
    world.ask(&[&b"PEXPIRE"[..], request.id.as_bytes(), b"600000"]);

    let (ours, smallest) = (usage(&world, world.key(&request.id).as_bytes()), usage(&world, request.id.as_bytes()));
    let ratio = ours as f64 / smallest as f64;
    println!(
        "a settled record with a body of 512 bytes: {ours} bytes, {ratio:.3} times the smallest hash ({smallest})"
    );
    assert!(ratio <= 1.35, "{ratio}");
}
