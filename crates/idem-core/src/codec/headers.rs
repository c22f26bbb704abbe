//! The encoding of header fields.

use std::sync::Arc;

use bytes::{Buf, Bytes};

use super::error::CodecError;
use crate::record::HeaderField;

/// Encodes header fields in their order: for each the length of its name (4 bytes, big endian), the name, the length
/// of its value, the value.
#[must_use]
pub fn encode_headers(headers: &[HeaderField]) -> Vec<u8> {
    let mut out = Vec::with_capacity(headers.iter().map(|field| 8 + field.name.len() + field.value.len()).sum());
    for part in headers.iter().flat_map(|field| [&field.name, &field.value]) {
        // Servers bound their header block far below 4 GiB, and a part of that size would not fit a record.
        let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
        out.extend(length.to_be_bytes());
        out.extend_from_slice(&part[..length as usize]);
    }
    out
}

/// Reads what [`encode_headers`] wrote; the fields share the memory of `encoded`.
///
/// # Errors
/// [`CodecError::Damaged`] when a length points beyond the end.
pub fn decode_headers(mut encoded: Bytes) -> Result<Arc<[HeaderField]>, CodecError> {
    let mut headers = Vec::new();
    while !encoded.is_empty() {
        let name = take_part(&mut encoded)?;
        headers.push(HeaderField { name, value: take_part(&mut encoded)? });
    }
    Ok(headers.into())
}

fn take_part(encoded: &mut Bytes) -> Result<Bytes, CodecError> {
    let length = encoded.try_get_u32().map_err(|_| CodecError::Damaged("header fields"))? as usize;
    if length > encoded.len() {
        return Err(CodecError::Damaged("header fields"));
    }
    Ok(encoded.split_to(length))
}
