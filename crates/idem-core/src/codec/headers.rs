//! The encoding of the header fields of an answer, and of the trace of the run that gave it.

use std::sync::Arc;

use bytes::{Buf, Bytes};

use super::error::CodecError;
use crate::record::HeaderField;
use crate::trace::TraceParent;

/// What a trace begins with. A name of this length would not fit a record.
const TRACE: u32 = u32::MAX;

/// Encodes header fields in their order: for each the length of its name (4 bytes, big endian), the name, the length
/// of its value, the value. A trace comes first: four bytes of 255, and its 25 bytes.
#[must_use]
pub fn encode_headers(headers: &[HeaderField], trace: Option<&TraceParent>) -> Vec<u8> {
    let fields: usize = headers.iter().map(|field| 8 + field.name.len() + field.value.len()).sum();
    let mut out = Vec::with_capacity(fields + trace.map_or(0, |trace| 4 + trace.as_bytes().len()));
    if let Some(trace) = trace {
        out.extend(TRACE.to_be_bytes());
        out.extend_from_slice(trace.as_bytes());
    }
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
/// [`CodecError::Damaged`] when a length points beyond the end, or the trace is none.
pub fn decode_headers(mut encoded: Bytes) -> Result<(Arc<[HeaderField]>, Option<TraceParent>), CodecError> {
    let trace = if encoded.starts_with(&TRACE.to_be_bytes()) {
        encoded.advance(TRACE.to_be_bytes().len());
        Some(take_trace(&mut encoded)?)
    } else {
        None
    };
    let mut headers = Vec::new();
    while !encoded.is_empty() {
        let name = take_part(&mut encoded)?;
        headers.push(HeaderField { name, value: take_part(&mut encoded)? });
    }
    Ok((headers.into(), trace))
}

fn take_trace(encoded: &mut Bytes) -> Result<TraceParent, CodecError> {
    let mut bytes = [0; 25];
    encoded.try_copy_to_slice(&mut bytes).map_err(|_| CodecError::Damaged("trace"))?;
    TraceParent::from_bytes(bytes).map_err(|_| CodecError::Damaged("trace"))
}

fn take_part(encoded: &mut Bytes) -> Result<Bytes, CodecError> {
    let length = encoded.try_get_u32().map_err(|_| CodecError::Damaged("header fields"))? as usize;
    if length > encoded.len() {
        return Err(CodecError::Damaged("header fields"));
    }
    Ok(encoded.split_to(length))
}
