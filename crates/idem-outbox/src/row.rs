//! How header fields are kept in a row.

use idem_core::{StoreError, StoreErrorKind};

pub(crate) fn write_headers(headers: &[(String, String)]) -> Result<String, StoreError> {
    serde_json::to_string(headers).map_err(|error| {
        let message = "the header fields of a message could not be written";
        StoreError::new(StoreErrorKind::Corrupt, message).with_source(error)
    })
}

pub(crate) fn read_headers(headers: &str) -> Result<Vec<(String, String)>, StoreError> {
    serde_json::from_str(headers).map_err(|error| {
        let message = "the header fields of a message in the outbox cannot be read";
        StoreError::new(StoreErrorKind::Corrupt, message).with_source(error)
    })
}
