//! The layer's OpenAPI description.

use idem_actix::HttpPolicy;
use utoipa::openapi::path::OperationBuilder;

use crate::support::at_most_once;

#[tokio::test]
async fn a_layer_describes_what_its_policy_does() {
    let policy = HttpPolicy::new().key_optional().key_header("x-key").replay_header("x-replayed");
    let (mut by_layer, mut by_policy) = (OperationBuilder::new().build(), OperationBuilder::new().build());
    at_most_once().policy(policy.clone()).describe(&mut by_layer);
    policy.describe(&mut by_policy);
    let described = serde_json::to_value(&by_layer).unwrap();
    assert_eq!(described, serde_json::to_value(&by_policy).unwrap());
    assert_eq!(described["parameters"][0]["name"], "x-key");
}
