//! Reads and removes records by scans of the table.

use std::num::NonZeroU32;

use async_trait::async_trait;
use idem_core::{
    CountPage, Inspect, Inspection, Purge, RecordCounts, RecordFilter, RecordId, RecordPage, RecordSummary,
    ScanPosition, StoreError, StoreErrorKind, Timestamp,
};

use crate::attributes::{Item, bytes_of, key_of, number, text_of};
use crate::error::failed;
use crate::item::{self, Version};
use crate::parts::PREFIX;
use crate::records::{Records, VERSION, Written};
use crate::store::DynamoStore;

/// The records of a part of the table. An error is a record that cannot be read.
struct Part {
    records: Vec<Result<RecordSummary, StoreError>>,
    next: Option<ScanPosition>,
    now: Timestamp,
}

/// A scan reads all items, also parts and notes, and the service charges for them. So a part may have fewer records than asked for. Their
/// order is the service's, and a change does not move a record.
#[async_trait]
impl Inspect for DynamoStore {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let found = self.records.read("inspect", id).await?;
        let (record, origin) = found.stored.map(|stored| (stored.record, stored.origin)).unzip();
        Ok(Inspection { record, origin, runs_in_transaction: false, now: found.now })
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        let Part { records, next, now } = self.records.part("list records", from, limit).await?;
        let (scanned, read) = (records.len() as u64, records.iter().filter(|record| record.is_ok()).count() as u64);
        let records = records.into_iter().flatten().filter(|record| filter.selects(record, now)).collect();
        Ok(RecordPage { records, scanned, unreadable: scanned - read, next, progress: None, now })
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let Part { records, next, now } = self.records.part("count records", from, limit).await?;
        let mut counts = RecordCounts::default();
        for record in records {
            match record {
                Ok(record) => counts.add(&record, now),
                Err(_) => counts.unreadable += 1,
            }
        }
        Ok(CountPage { counts, next, progress: None, now })
    }
}

/// The TTL of the table removes expired records within days, and costs nothing. A purge scans the whole table, and is for tables without
/// a TTL.
#[async_trait]
impl Purge for DynamoStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.records.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}

impl Records {
    async fn part(&self, what: &str, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<Part, StoreError> {
        let from = from.map(|from| position(what, from)).transpose()?;
        let limit = i32::try_from(limit.get()).unwrap_or(i32::MAX);
        let sent = self.clock.elapsed();
        let scan = self.client.scan().table_name(&self.table).consistent_read(true).limit(limit);
        let page = scan.set_exclusive_start_key(from).send().await.map_err(|error| failed(what, false, error))?;
        let mut records = Vec::new();
        for item in page.items.unwrap_or_default() {
            let Some(id) = item::id(&item) else { continue };
            let record = match self.found(what, &id, Some(item), sent).await {
                // It has expired, or was removed while its parts were read.
                Ok(found) => match found.stored {
                    Some(stored) => Ok(RecordSummary::new(id, Some(stored.origin), &stored.record)),
                    None => continue,
                },
                Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                    tracing::warn!(record = %id, error = &error as &dyn std::error::Error, "a record cannot be read");
                    Err(error)
                }
                Err(error) => return Err(error),
            };
            records.push(record);
        }
        let next = page.last_evaluated_key.filter(|key| !key.is_empty()).map(|key| after(&key)).transpose()?;
        Ok(Part { records, next, now: self.clock.now()? })
    }

    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        let what = "purge";
        let now = self.clock.now()?;
        let (mut purged, mut from) = (0, None);
        loop {
            let scan = self
                .client
                .scan()
                .table_name(&self.table)
                .consistent_read(true)
                .filter_expression("expires_at <= :now")
                .projection_expression("pk, sk, #version, parts, part_count")
                .expression_attribute_names(VERSION.0, VERSION.1)
                .expression_attribute_values(":now", number(now.unix_micros()))
                .set_exclusive_start_key(from);
            let page = scan.send().await.map_err(|error| failed(what, false, error))?;
            for item in page.items.unwrap_or_default() {
                if purged == limit.get() {
                    return Ok(purged);
                }
                purged += u32::from(self.remove_expired(what, &item).await?);
            }
            from = page.last_evaluated_key.filter(|key| !key.is_empty());
            if from.is_none() {
                return Ok(purged);
            }
        }
    }

    /// Removes an expired item of the store, and returns whether it was a record. A record that is used again has another version. It goes
    /// before its parts, so that none is half removed.
    async fn remove_expired(&self, what: &str, item: &Item) -> Result<bool, StoreError> {
        let (Some(partition), Some(sort)) = (bytes_of(item, "pk")?, text_of(item, "sk")?) else { return Ok(false) };
        // The table may have items of the application.
        let Ok(id) = partition.try_into().map(RecordId::from_bytes) else { return Ok(false) };
        if sort.starts_with(PREFIX) {
            let is_named = self.parts_there(what, &id).await?.is_some_and(|parts| sort.starts_with(&parts.prefix()));
            if !is_named {
                let remove = self.client.delete_item().table_name(&self.table).set_key(Some(key_of(partition, sort)));
                remove.send().await.map_err(|error| failed(what, true, error))?;
            }
            return Ok(false);
        }
        if sort != item::RECORD {
            return Ok(false);
        }
        let (version, parts) = match (Version::of(item), item::parts(item)) {
            (Ok(version), Ok(parts)) => (version, parts),
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(record = %id, error = &error as &dyn std::error::Error, "an expired record cannot be removed");
                return Ok(false);
            }
        };
        match self.remove(what, &id, Some(version)).await? {
            Written::Done => {
                self.sightings.forget(&id);
                if let Some(parts) = parts {
                    self.parts().remove_quietly(&id, parts).await;
                }
                Ok(true)
            }
            Written::Changed(_) => Ok(false),
            Written::InTheWay(error) | Written::Unanswered(error) => Err(error),
        }
    }

    /// Removes all parts that a record does not name.
    pub(crate) async fn remove_parts(&self, what: &str, id: &RecordId) -> Result<(), StoreError> {
        let named = self.parts_there(what, id).await?;
        self.parts().remove_all(what, id, named).await
    }
}

/// The length of the partition key in a byte, the partition key, the sort key.
fn after(key: &Item) -> Result<ScanPosition, StoreError> {
    let partition = bytes_of(key, "pk")?.unwrap_or_default();
    let sort = text_of(key, "sk")?.unwrap_or_default();
    let length = u8::try_from(partition.len()).map_err(|_| crate::error::damaged("pk"))?;
    Ok(ScanPosition::from_bytes([&[length], partition, sort.as_bytes()].concat()))
}

fn position(what: &str, from: &ScanPosition) -> Result<Item, StoreError> {
    let read = || {
        let (length, rest) = from.as_bytes().split_first()?;
        let (partition, sort) = rest.split_at_checked(usize::from(*length))?;
        Some(key_of(partition, std::str::from_utf8(sort).ok()?))
    };
    read().ok_or_else(|| {
        let message = format!("could not {what}: the position is of another store; begin again");
        StoreError::new(StoreErrorKind::Misconfigured, message)
    })
}
