//! A listing whose server is replaced.

use std::num::NonZeroU32;

use idem_core::{IdempotencyStore as _, Inspect as _, RecordFilter, StoreErrorKind};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::Redis;
use idem_testkit::fixture::request;

/// A cursor of SCAN means something to one process of the server only.
#[tokio::test]
async fn a_listing_does_not_go_on_after_a_restart() {
    let mut server = Redis::start_with(&["--appendonly", "yes"]).unwrap();
    let store = RedisStore::open(RedisConfig::new(server.url())).await.unwrap();
    for _ in 0..50 {
        store.acquire(&request()).await.unwrap();
    }
    let filter = RecordFilter::default();
    let next = store.list(&filter, None, NonZeroU32::MIN).await.unwrap().next.unwrap();
    store.list(&filter, Some(&next), NonZeroU32::MIN).await.unwrap();
    server.restart().unwrap();
    let error = store.list(&filter, Some(&next), NonZeroU32::MIN).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("begin again"), "{error}");
}
