//! Records as items.
//!
//! Each item of the table has the partition key `pk`, bytes, and the sort key `sk`, text:
//!
//! | `pk` | `sk` | what |
//! |---|---|---|
//! | the id of a record | `record` | the record: the columns of [`FlatRecord`], its origin, and its `version` |
//! | the id of a record | `part/` and a token and a number | a part of what is too large for the record's item: `parts` |
//! | `identity` | `identity` | the identity of the records |
//! | `repairs` | the time and the action | a note of a repair |
//! | `repair/` and the action | `action` | the sort key of its note |
//!
//! `version` is random, and new at each write. So a write that expects a version never meets a record that was removed and made anew.
//! `ttl` is for the service, which removes expired items within days: seconds since 1970, a minute later than `expires_at`.

use aws_sdk_dynamodb::types::AttributeValue;
use bytes::Bytes;
use idem_core::codec::{CodecError, FlatRecord};
use idem_core::{Origin, OwnerToken, Record, RecordId, Scope, State, StoreError, Timestamp};

use crate::attributes::{Item, bytes, bytes_of, key_of, number, number_of, text, text_of, ttl};
use crate::error::damaged;
use crate::parts::{Large, Parts};

/// The sort key of a record.
pub(crate) const RECORD: &str = "record";

/// Which write made an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version([u8; 16]);

impl Version {
    pub(crate) fn random() -> Self {
        Self(*OwnerToken::random().as_bytes())
    }

    pub(crate) fn of(item: &Item) -> Result<Self, StoreError> {
        let bytes = bytes_of(item, "version")?.ok_or_else(|| damaged("version"))?;
        bytes.try_into().map(Self).map_err(|_| damaged("version"))
    }

    pub(crate) fn value(self) -> AttributeValue {
        bytes(self.0)
    }
}

/// A record as it was read.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) record: Record,
    pub(crate) version: Version,
    pub(crate) origin: Origin,
}

impl Stored {
    /// Whether another owner than this one runs it, or has crashed while running it.
    pub(crate) fn is_leased_by_other(&self, owner: OwnerToken) -> bool {
        let holder = self.record.owner;
        self.is_leased() && holder != owner
    }

    /// Whether an owner runs it, or has crashed while running it.
    pub(crate) fn is_leased(&self) -> bool {
        is_leased(&self.record)
    }
}

/// Whether an owner runs it, or has crashed while running it. A released record has no owner.
pub(crate) fn is_leased(record: &Record) -> bool {
    matches!(record.state, State::InProgress { .. }) && record.owner != OwnerToken::NOBODY
}

/// The key of the item of a record.
pub(crate) fn key(id: &RecordId) -> Item {
    key_of(id.as_bytes(), RECORD)
}

/// The id of the record of an item; `None` if the item is no record.
pub(crate) fn id(item: &Item) -> Option<RecordId> {
    if text_of(item, "sk").ok()?? != RECORD {
        return None;
    }
    bytes_of(item, "pk").ok()??.try_into().ok().map(RecordId::from_bytes)
}

/// The item of a record. Its large columns are in `parts`, if those are given.
pub(crate) fn write(id: &RecordId, origin: &Origin, version: Version, flat: FlatRecord, parts: Option<&Parts>) -> Item {
    let mut item = key(id);
    let mut put = |name: &str, value: Option<AttributeValue>| {
        if let Some(value) = value {
            item.insert(name.to_owned(), value);
        }
    };
    put("version", Some(version.value()));
    put("format", Some(number(flat.format)));
    put("fingerprint_algorithm", Some(number(flat.fingerprint_algorithm)));
    put("fingerprint", Some(bytes(flat.fingerprint)));
    put("owner", Some(bytes(flat.owner)));
    put("attempt", Some(number(flat.attempt)));
    put("state", Some(number(flat.state)));
    put("acquisition", flat.acquisition.map(number));
    put("takeover", flat.takeover.map(number));
    put("lease_until", flat.lease_until.map(number));
    put("not_before", flat.not_before.map(number));
    put("checkpoint_name", flat.checkpoint_name.map(text));
    put("status", flat.status.map(number));
    put("created_at", Some(number(flat.created_at)));
    put("updated_at", Some(number(flat.updated_at)));
    put("expires_at", Some(number(flat.expires_at)));
    put("ttl", Some(ttl(flat.expires_at)));
    match parts {
        Some(parts) => {
            put("parts", Some(bytes(parts.token)));
            put("part_count", Some(number(i64::from(parts.count))));
        }
        None => {
            put("checkpoint_data", flat.checkpoint_data.map(bytes));
            put("headers", flat.headers.map(bytes));
            put("body", flat.body.map(bytes));
        }
    }
    put("namespace", Some(text(&*origin.namespace)));
    put("principal", origin.scope.principal().map(text));
    put("operation", Some(text(origin.scope.operation())));
    item
}

/// What an item says about its parts.
pub(crate) fn parts(item: &Item) -> Result<Option<Parts>, StoreError> {
    match (bytes_of(item, "parts")?, number_of(item, "part_count")?) {
        (Some(token), Some(count)) => {
            let token = token.try_into().map_err(|_| damaged("parts"))?;
            let count = u32::try_from(count).map_err(|_| damaged("part_count"))?;
            Ok(Some(Parts { token, count }))
        }
        (None, None) => Ok(None),
        _ => Err(damaged("parts")),
    }
}

/// Reads a record. `large` are the columns that its parts hold.
pub(crate) fn read(item: &Item, large: Option<Large>) -> Result<Stored, StoreError> {
    let required = |name: &'static str| number_of(item, name)?.ok_or_else(|| damaged(name));
    let required_bytes = |name: &'static str| bytes_of(item, name)?.ok_or_else(|| damaged(name));
    let large = match large {
        Some(large) => large,
        None => Large {
            checkpoint_data: bytes_of(item, "checkpoint_data")?.map(<[u8]>::to_vec),
            headers: bytes_of(item, "headers")?.map(<[u8]>::to_vec),
            body: bytes_of(item, "body")?.map(Bytes::copy_from_slice),
        },
    };
    let flat = FlatRecord {
        format: required("format")?,
        fingerprint_algorithm: required("fingerprint_algorithm")?,
        fingerprint: required_bytes("fingerprint")?.to_vec(),
        owner: required_bytes("owner")?.to_vec(),
        attempt: required("attempt")?,
        state: required("state")?,
        acquisition: number_of(item, "acquisition")?,
        takeover: number_of(item, "takeover")?,
        lease_until: number_of(item, "lease_until")?,
        not_before: number_of(item, "not_before")?,
        checkpoint_name: text_of(item, "checkpoint_name")?.map(str::to_owned),
        checkpoint_data: large.checkpoint_data,
        status: number_of(item, "status")?,
        headers: large.headers,
        body: large.body,
        created_at: required("created_at")?,
        updated_at: required("updated_at")?,
        expires_at: required("expires_at")?,
    };
    let record = Record::try_from(flat).map_err(unreadable)?;
    Ok(Stored { record, version: Version::of(item)?, origin: origin(item)? })
}

fn unreadable(error: CodecError) -> StoreError {
    crate::error::unreadable().with_source(error)
}

fn origin(item: &Item) -> Result<Origin, StoreError> {
    let operation = text_of(item, "operation")?.ok_or_else(|| damaged("operation"))?;
    let scope = match text_of(item, "principal")? {
        Some(principal) => Scope::new(principal, operation),
        None => Scope::single_tenant(operation),
    };
    let namespace = text_of(item, "namespace")?.ok_or_else(|| damaged("namespace"))?;
    Ok(Origin { namespace: namespace.into(), scope })
}

/// When an item expires.
pub(crate) fn expires_at(item: &Item) -> Result<Timestamp, StoreError> {
    let micros = number_of(item, "expires_at")?.ok_or_else(|| damaged("expires_at"))?;
    Ok(Timestamp::from_unix_micros(micros))
}
