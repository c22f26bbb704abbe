//! Whether answers that this process writes can be read by the application.

use std::error::Error;
use std::num::NonZeroU32;

use idem_core::{RecordFilter, RecordId};
use idem_encryption::{EncryptedStore, is_sealed};

use crate::store::Store;
use crate::with_causes;

const NO_KEYS: &str = "nothing was changed: the answers of this store are encrypted, and without keys yours would be stored as plain \
    text, which the application refuses to read; give --keys FILE with the keys of the application";

const UNPROVEN: &str = "nothing was changed: no record was found that the primary key of --keys has sealed, so it is not known whether \
    the application can read what this key seals; compare its id, its digits and the context with those of the application, then \
    give --dangerous-unverified-key";

const WRONG: &str = "nothing was changed: the application could not read the answer, because a key or the context in --keys is not \
    that of the application";

/// How many records are listed.
const RECORDS: NonZeroU32 = NonZeroU32::new(1_000).unwrap();

/// How many of them are read to find sealed parts, those that changed last.
const SAMPLES: usize = 100;

/// Refuses a store whose application could not read an answer that is written now.
///
/// Without keys, no record may be sealed. With keys, a record must have been sealed with the primary key and open, unless the
/// operator accepts an `unproven` key. The record `id` is read first, then records of the first part of a scan. Not noticed without
/// keys: a store whose first records are not sealed, or which cannot be listed, as a Redis Cluster.
pub(crate) async fn expect_readable(
    store: &dyn Store,
    id: Option<RecordId>,
    unproven: bool,
) -> Result<(), Box<dyn Error>> {
    match store.encrypted() {
        Some(encrypted) => expect_key(encrypted, id, unproven).await,
        None if is_encrypted(store, id).await => Err(NO_KEYS.into()),
        None => Ok(()),
    }
}

async fn is_encrypted(store: &dyn Store, id: Option<RecordId>) -> bool {
    for id in samples(store, id).await {
        // Other records must not hinder the repair of this one.
        if let Ok(inspection) = store.inspect(&id).await
            && inspection.record.as_ref().is_some_and(is_sealed)
        {
            return true;
        }
    }
    false
}

async fn expect_key(
    encrypted: &EncryptedStore<dyn Store>,
    id: Option<RecordId>,
    unproven: bool,
) -> Result<(), Box<dyn Error>> {
    let (inner, mut wrong) = (&**encrypted.inner(), None);
    for id in samples(inner, id).await {
        let Ok(inspection) = inner.inspect(&id).await else { continue };
        let Some(record) = &inspection.record else { continue };
        match encrypted.proves_primary_key(&id, record) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => wrong = Some(error),
        }
    }
    match wrong {
        Some(error) => Err(format!("{WRONG}: {}", with_causes(&error)).into()),
        None if unproven => Ok(()),
        None => Err(UNPROVEN.into()),
    }
}

/// The given record, and those of the first part of a scan that may have a sealed part and changed last.
async fn samples(store: &dyn Store, id: Option<RecordId>) -> Vec<RecordId> {
    let mut records = match store.list(&RecordFilter::default(), None, RECORDS).await {
        Ok(page) => page.records,
        Err(error) => {
            eprintln!("idem: other records cannot be looked at for sealed answers: {}", with_causes(&error));
            Vec::new()
        }
    };
    records.retain(|record| record.status.is_some() || record.checkpoint.is_some());
    records.sort_by_key(|record| std::cmp::Reverse(record.updated_at));
    id.into_iter().chain(records.iter().take(SAMPLES).map(|record| record.id)).collect()
}
