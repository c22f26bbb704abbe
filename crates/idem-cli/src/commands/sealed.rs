//! Whether the answers of a store are encrypted, as a tool without keys can see.

use std::num::NonZeroU32;

use idem_core::{Record, RecordFilter, StateName};
use idem_encryption::is_sealed;

use crate::store::Store;
use crate::with_causes;

/// What to do about it.
pub(crate) const ADVICE: &str = "nothing was changed: the answers of this store are encrypted, and without keys yours would be stored \
    as plain text, which the application refuses to read; give --keys FILE with the keys of the application";

/// How many records are looked through for encrypted answers, and how many answers are read.
const RECORDS: NonZeroU32 = NonZeroU32::new(1_000).unwrap();
const ANSWERS: usize = 10;

/// Whether this record has a sealed part, or one of some other records. Not noticed: a store whose first records have no answer, or
/// which cannot be listed, as a Redis Cluster. Other records must not hinder the repair of this one.
pub(crate) async fn is_encrypted(store: &dyn Store, record: &Record) -> bool {
    if is_sealed(record) {
        return true;
    }
    let states = vec![StateName::Completed, StateName::Failed, StateName::Retryable];
    let filter = RecordFilter { states, ..RecordFilter::default() };
    let records = match store.list(&filter, None, RECORDS).await {
        Ok(page) => page.records,
        Err(error) => {
            eprintln!("idem: whether this store is encrypted is not known: {}", with_causes(&error));
            return false;
        }
    };
    for found in records.iter().take(ANSWERS) {
        if let Ok(inspection) = store.inspect(&found.id).await
            && inspection.record.as_ref().is_some_and(is_sealed)
        {
            return true;
        }
    }
    false
}
