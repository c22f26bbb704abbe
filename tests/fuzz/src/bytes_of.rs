//! Reads byte strings from an input.

use arbitrary::{Result, Unstructured};

/// Reads at most `longest` bytes.
pub(crate) fn bytes(input: &mut Unstructured<'_>, longest: usize) -> Result<Vec<u8>> {
    let length = input.int_in_range(0..=longest)?;
    let length = length.min(input.len());
    input.bytes(length).map(<[u8]>::to_vec)
}

/// Reads exactly this many bytes, padded with zeros if the input ends.
pub(crate) fn array<const LENGTH: usize>(input: &mut Unstructured<'_>) -> Result<[u8; LENGTH]> {
    let mut array = [0; LENGTH];
    input.fill_buffer(&mut array)?;
    Ok(array)
}

/// Reads text of at most `longest` bytes.
pub(crate) fn text(input: &mut Unstructured<'_>, longest: usize) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(input, longest)?).into_owned())
}

/// Reads a value in three of four cases.
pub(crate) fn maybe<'a, T>(
    input: &mut Unstructured<'a>,
    some: impl FnOnce(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Option<T>> {
    if input.ratio(3, 4)? { some(input).map(Some) } else { Ok(None) }
}
