//! Generates documents from an input's bytes. All of them are valid JSON, unlike most texts that a fuzzer tries.

use arbitrary::{Result, Unstructured};

use super::value::Json;
use crate::bytes_of::text;

pub(crate) fn document(bytes: &[u8]) -> Result<Json> {
    value(&mut Unstructured::new(bytes), 0)
}

fn value(input: &mut Unstructured<'_>, depth: usize) -> Result<Json> {
    // The depth is limited, because texts test depth.
    let kinds = if depth < 6 { 6 } else { 3 };
    Ok(match input.int_in_range(0..=kinds)? {
        0 => Json::Literal(input.choose(&["true", "false", "null"])?),
        1 => Json::Number(number(input)?),
        2 | 3 => Json::String(text(input, 12)?),
        4 => {
            let length = input.int_in_range(0..=5)?;
            Json::Array((0..length).map(|_| value(input, depth + 1)).collect::<Result<_>>()?)
        }
        _ => {
            let length = input.int_in_range(0..=6)?;
            Json::Object((0..length).map(|_| Ok((text(input, 4)?, value(input, depth + 1)?))).collect::<Result<_>>()?)
        }
    })
}

fn number(input: &mut Unstructured<'_>) -> Result<String> {
    let sign = input.choose(&["", "-"])?;
    let integer: u64 = input.arbitrary()?;
    let integer = integer >> input.int_in_range(0..=63)?;
    let fraction = input.choose(&["", ".0", ".50", ".000000000000000000001"])?;
    let exponent = input.choose(&["", "", "e0", "E+7", "e-12", "e999"])?;
    Ok(format!("{sign}{integer}{fraction}{exponent}"))
}
