//! What a read finds under the key of a record.

use idem_core::{Record, StoreError, Timestamp, machine};
use redis::Value;

use crate::error::damaged;
use crate::packed::{self, Fresh, Stored};
use crate::reply;

/// What an exchange has found under a key.
pub(crate) enum Found {
    Nothing,
    /// Nothing, so the exchange has written the new record.
    Begun,
    Record(Box<Stored>),
}

/// A record as it was seen.
pub(crate) struct Seen {
    /// The server's time before the read, but not before the record's last change.
    pub(crate) now: Timestamp,
    pub(crate) found: Found,
    pub(crate) too_few: Option<i64>,
}

impl Seen {
    /// Parses the time, the value and the expiry of the key; `None` when the record expired in between.
    pub(crate) fn read(
        values: Vec<Value>,
        new: Option<&Fresh>,
        too_few: Option<i64>,
        offset: i64,
    ) -> Result<Option<Self>, StoreError> {
        /// The reply of `PEXPIRETIME` when there is no such key.
        const GONE: i64 = -2;
        let [time, found, expires] = reply::array(values)?;
        let (time, found, expires_ms) =
            (reply::server_time(time)?, reply::maybe_bytes(found)?, reply::number(&expires)?);
        let found = match (found, new) {
            (Some(_), _) if expires_ms == GONE => return Ok(None),
            (Some(record), _) => Found::Record(Box::new(Stored::read(record, expires_ms, offset)?)),
            (None, None) => Found::Nothing,
            // A short-lived record may expire before its expiry is read.
            (None, Some(new)) if expires_ms == GONE || packed::lasts(expires_ms, new.life_ms, time) => Found::Begun,
            (None, Some(_)) => {
                let error =
                    "its key expires sooner than asked for, and its lease with it; find out what changes expiries";
                // The new record is already written.
                return Err(damaged(error).indeterminate());
            }
        };
        let mut now = Timestamp::from_unix_micros(time.unix_micros().saturating_add(offset));
        if let Found::Record(stored) = &found {
            // The last change may seem to be in the future: by a millisecond, or after a failover to a server whose clock is
            // behind.
            now = now.max(stored.record.updated_at);
        }
        Ok(Some(Self { now, found, too_few }))
    }

    /// The record, if it still counts.
    pub(crate) fn record(&self) -> Option<&Record> {
        match &self.found {
            Found::Record(stored) => machine::current(Some(&stored.record), self.now),
            Found::Nothing | Found::Begun => None,
        }
    }
}
