//! Counts what is acknowledged while no replica listens.

use idem_core::{AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, OwnerToken, RecordId, Settlement};
use idem_redis::RedisStore;

use super::Stores;
use super::request::{request, response};
use crate::Error;
use crate::records::DAY;

/// One operation whose settlement the replicas do not get. A second store repeats it on connections that have written nothing:
/// `WAIT` is documented to await only the writes on its connection.
pub(super) struct Alone {
    owner: RedisStore,
    other: RedisStore,
    lease: Lease,
}

impl Alone {
    /// Acquires a key while the replicas listen.
    pub(super) async fn begin(stores: &Stores, id: RecordId) -> Result<Self, Error> {
        let owner = RedisStore::open(stores.config.clone()).await?;
        let other = RedisStore::open(stores.config.clone()).await?;
        match owner.acquire(&request(id, OwnerToken::random())).await? {
            AcquireOutcome::Acquired(lease) => Ok(Self { owner, other, lease }),
            outcome => Err(format!("a fresh key was not acquired: {outcome:?}").into()),
        }
    }

    /// Continues while no replica listens. Returns the number of acknowledgements that a failover could take back.
    pub(super) async fn go_on(self) -> u64 {
        let settlement = Settlement::Completed(response(&self.lease.id, Some(self.lease.owner)));
        let rival = request(self.lease.id, OwnerToken::random());
        let settled = self.owner.settle(&self.lease, &settlement, DAY).await;
        let (again, replayed) =
            tokio::join!(self.other.settle(&self.lease, &settlement, DAY), self.other.acquire(&rival));
        let settled = [settled, again].iter().filter(|answer| matches!(answer, Ok(OwnerOutcome::Applied))).count();
        settled as u64 + u64::from(matches!(replayed, Ok(AcquireOutcome::Replay(_))))
    }
}
