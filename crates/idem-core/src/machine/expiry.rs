//! Records whose retention is over.

use crate::record::Record;
use crate::timestamp::Timestamp;

/// The record, or `None` once its retention is over.
#[must_use]
pub fn current(record: Option<&Record>, now: Timestamp) -> Option<&Record> {
    record.filter(|record| now < record.expires_at)
}
