//! Columns that are too large for one item.
//!
//! An item has at most 400 KB. If checkpoint, header fields and body of a record take more than [`INLINE`], they are cut into items of
//! their own, which are written before the record names them. No write changes a part. Parts that no record names expire with the record
//! that they were written for.

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::types::AttributeValue;
use bytes::{Buf as _, BufMut as _, Bytes};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use idem_core::codec::FlatRecord;
use idem_core::{OwnerToken, RecordId, StoreError, StoreErrorKind};

use crate::attributes::{Item, bytes, bytes_of, hex, key_of, number, text, text_of, ttl};
use crate::error::{damaged, failed};

/// The most bytes of these columns in the item of a record. The service charges a repeat, which is a refused write, by the size of this
/// item. A read of parts costs less, and takes another round trip.
const INLINE: usize = 16 * 1024;

/// The bytes of a part. Emulators count them in Base64, which is a third more.
const PART: usize = 288 * 1024;

/// How many parts are written or removed at once.
const AT_ONCE: usize = 4;

/// Where sort keys of parts begin.
pub(crate) const PREFIX: &str = "part/";

/// What a record says about its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Random, for one write of one record.
    pub(crate) token: [u8; 16],
    pub(crate) count: u32,
}

impl Parts {
    pub(crate) fn prefix(self) -> String {
        format!("{PREFIX}{}/", hex(&self.token))
    }
}

/// The columns of a record that may be large.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Large {
    pub(crate) checkpoint_data: Option<Vec<u8>>,
    pub(crate) headers: Option<Vec<u8>>,
    pub(crate) body: Option<Bytes>,
}

/// The parts of a record that has to be cut, and their bytes.
pub(crate) struct Cut {
    pub(crate) parts: Parts,
    bytes: Vec<u8>,
    expires_at: i64,
}

impl Cut {
    /// `None` if all columns fit into the item.
    pub(crate) fn of(flat: &FlatRecord) -> Result<Option<Self>, StoreError> {
        let columns = [flat.checkpoint_data.as_deref(), flat.headers.as_deref(), flat.body.as_deref()];
        if columns.iter().flatten().map(|column| column.len()).sum::<usize>() <= INLINE {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        for column in columns {
            // One more than the length, and 0 for a column that is not there.
            let length = column.map_or(Some(0), |column| u32::try_from(column.len()).ok()?.checked_add(1));
            bytes.put_u32(length.ok_or_else(too_large)?);
            bytes.put_slice(column.unwrap_or_default());
        }
        let count = u32::try_from(bytes.len().div_ceil(PART)).map_err(|_| too_large())?;
        let parts = Parts { token: *OwnerToken::random().as_bytes(), count };
        Ok(Some(Self { parts, bytes, expires_at: flat.expires_at }))
    }
}

fn too_large() -> StoreError {
    StoreError::new(StoreErrorKind::Capacity, "could not write a record: it takes more than 4 GB")
}

/// Reads what [`Cut::of`] wrote.
fn join(bytes: Vec<u8>) -> Result<Large, StoreError> {
    let mut rest = Bytes::from(bytes);
    let mut column = || -> Result<Option<Bytes>, StoreError> {
        let length = rest.try_get_u32().map_err(|_| damaged("parts"))?;
        let Some(length) = length.checked_sub(1) else { return Ok(None) };
        if rest.len() < length as usize {
            return Err(damaged("parts"));
        }
        Ok(Some(rest.split_to(length as usize)))
    };
    let large = Large { checkpoint_data: column()?.map(Vec::from), headers: column()?.map(Vec::from), body: column()? };
    if rest.is_empty() { Ok(large) } else { Err(damaged("parts")) }
}

/// Reads and writes parts in a table.
#[derive(Debug, Clone)]
pub(crate) struct PartItems {
    pub(crate) client: Client,
    pub(crate) table: String,
}

impl PartItems {
    /// Writes the parts of a record.
    pub(crate) async fn write(&self, what: &str, id: &RecordId, cut: &Cut) -> Result<(), StoreError> {
        let prefix = cut.parts.prefix();
        let writes = cut.bytes.chunks(PART).enumerate().map(|(at, part)| {
            let mut item = key_of(id.as_bytes(), &format!("{prefix}{at:08}"));
            item.insert("part".to_owned(), bytes(part));
            item.insert("expires_at".to_owned(), number(cut.expires_at));
            item.insert("ttl".to_owned(), ttl(cut.expires_at));
            self.client.put_item().table_name(&self.table).set_item(Some(item)).send()
        });
        let writes: Vec<_> = writes.collect();
        let written = stream::iter(writes).buffer_unordered(AT_ONCE).try_for_each(async |_| Ok(()));
        // A part that stays behind is no effect.
        written.await.map_err(|error| failed(what, false, error))
    }

    /// Reads the parts of a record; `None` if some are gone, because the record has changed since.
    pub(crate) async fn read(&self, what: &str, id: &RecordId, parts: Parts) -> Result<Option<Large>, StoreError> {
        let found = self.find(what, id, &parts.prefix(), true).await?;
        if found.len() != parts.count as usize {
            return Ok(None);
        }
        let mut whole = Vec::new();
        for item in found {
            whole.extend_from_slice(bytes_of(&item, "part")?.ok_or_else(|| damaged("part"))?);
        }
        join(whole).map(Some)
    }

    /// Removes parts that no record names any more. What stays behind expires.
    pub(crate) async fn remove_quietly(&self, id: &RecordId, parts: Parts) {
        let keys = (0..parts.count).map(|at| key_of(id.as_bytes(), &format!("{}{at:08}", parts.prefix())));
        if let Err(error) = self.remove("remove the parts of a record", keys).await {
            tracing::debug!(record = %id, error = &error as &dyn std::error::Error, "parts of a record stay until they expire");
        }
    }

    /// Removes all parts of a record, also those that no record names, but for `kept`.
    pub(crate) async fn remove_all(&self, what: &str, id: &RecordId, kept: Option<Parts>) -> Result<(), StoreError> {
        let found = self.find(what, id, PREFIX, false).await?;
        let kept = kept.map(Parts::prefix);
        let mut keys = Vec::new();
        for item in &found {
            let sort = text_of(item, "sk")?.unwrap_or_default();
            if kept.as_ref().is_none_or(|kept| !sort.starts_with(kept.as_str())) {
                keys.push(key_of(id.as_bytes(), sort));
            }
        }
        self.remove(what, keys).await
    }

    async fn remove(&self, what: &str, keys: impl IntoIterator<Item = Item>) -> Result<(), StoreError> {
        let removed = stream::iter(keys)
            .map(|key| self.client.delete_item().table_name(&self.table).set_key(Some(key)).send())
            .buffer_unordered(AT_ONCE)
            .try_for_each(async |_| Ok(()));
        removed.await.map_err(|error| failed(what, true, error))
    }

    /// The items of a record whose sort key begins so, in order.
    async fn find(&self, what: &str, id: &RecordId, prefix: &str, whole: bool) -> Result<Vec<Item>, StoreError> {
        let mut query = self
            .client
            .query()
            .table_name(&self.table)
            .consistent_read(true)
            .key_condition_expression("pk = :pk AND begins_with(sk, :prefix)")
            .expression_attribute_values(":pk", AttributeValue::B(id.as_bytes().to_vec().into()))
            .expression_attribute_values(":prefix", text(prefix));
        if !whole {
            query = query.projection_expression("pk, sk");
        }
        let (mut found, mut from) = (Vec::new(), None);
        loop {
            let page = query.clone().set_exclusive_start_key(from).send().await;
            let page = page.map_err(|error| failed(what, false, error))?;
            found.extend(page.items.unwrap_or_default());
            from = page.last_evaluated_key.filter(|key| !key.is_empty());
            if from.is_none() {
                return Ok(found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_survive_being_cut() {
        let large = |checkpoint_data: Option<&[u8]>, headers: Option<&[u8]>, body: Option<&[u8]>| Large {
            checkpoint_data: checkpoint_data.map(<[u8]>::to_vec),
            headers: headers.map(<[u8]>::to_vec),
            body: body.map(Bytes::copy_from_slice),
        };
        let mut whole = Vec::new();
        for column in [&b"\0\0\0\0"[..], b"\0\0\0\x01", b"\0\0\0\x03ab"] {
            whole.extend_from_slice(column);
        }
        assert_eq!(join(whole.clone()).unwrap(), large(None, Some(b""), Some(b"ab")));
        for damaged in [&whole[..whole.len() - 1], &[&whole[..], b"c"].concat(), &whole[..6], &[]] {
            assert_eq!(join(damaged.to_vec()).unwrap_err().kind(), StoreErrorKind::Corrupt);
        }
    }
}
