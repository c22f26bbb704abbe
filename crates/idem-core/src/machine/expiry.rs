//! Records whose retention is over.

use crate::record::Record;
use crate::timestamp::Timestamp;

/// The record if it still counts: one whose retention is over is as good as none.
#[must_use]
pub fn current(record: Option<&Record>, now: Timestamp) -> Option<&Record> {
    record.filter(|record| now < record.expires_at)
}
