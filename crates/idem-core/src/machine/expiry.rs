//! Records whose retention is over.

use std::time::Duration;

use crate::record::Record;
use crate::timestamp::Timestamp;

/// The shortest time for which a settled record is kept. With none at all, the next repeat would run again.
pub const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

/// The record, or `None` once its retention is over.
#[must_use]
pub fn current(record: Option<&Record>, now: Timestamp) -> Option<&Record> {
    record.filter(|record| now < record.expires_at)
}
