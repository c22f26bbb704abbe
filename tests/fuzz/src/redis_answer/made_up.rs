//! Generates answers from an input's bytes; most of them could come from a script.

use arbitrary::{Result, Unstructured};
use idem_core::codec::FlatRecord;
use redis::Value;

use crate::bytes_of::{bytes, maybe, text};
use crate::records;

pub(super) fn answer(bytes: &[u8]) -> Result<Value> {
    let input = &mut Unstructured::new(bytes);
    let mut values = match input.int_in_range(0..=9)? {
        0 => vec![number(input)?],
        1..=5 => vec![Value::Array(vec![number(input)?, number(input)?]), record(input)?, number(input)?],
        6 => vec![digits(input)?, entry(input)?],
        7 => return info(input),
        8 => return slots(input),
        _ => return any(input, 0),
    };
    spoil(input, &mut values)?;
    Ok(Value::Array(values))
}

/// Occasionally removes, adds or replaces something.
fn spoil(input: &mut Unstructured<'_>, values: &mut Vec<Value>) -> Result<()> {
    match input.int_in_range(0..=15)? {
        0 => values.push(any(input, 2)?),
        1 => values.truncate(values.len() - 1),
        2 => {
            let at = input.choose_index(values.len())?;
            values[at] = any(input, 2)?;
        }
        _ => {}
    }
    Ok(())
}

fn written(number: i64, as_digits: bool) -> Value {
    if as_digits { Value::BulkString(number.to_string().into()) } else { Value::Int(number) }
}

fn number(input: &mut Unstructured<'_>) -> Result<Value> {
    let number = if input.ratio(1, 4)? { input.arbitrary()? } else { input.int_in_range(-1..=5)? };
    Ok(written(number, input.arbitrary()?))
}

fn digits(input: &mut Unstructured<'_>) -> Result<Value> {
    Ok(written(input.arbitrary()?, true))
}

fn any_bytes(input: &mut Unstructured<'_>) -> Result<Value> {
    Ok(maybe(input, |input| bytes(input, 20))?.map_or(Value::Nil, Value::BulkString))
}

fn entry(input: &mut Unstructured<'_>) -> Result<Value> {
    let (rank, entry) = (input.arbitrary::<u64>()?, bytes(input, 60)?);
    Ok(Value::BulkString([rank.to_string().as_bytes(), b":", &entry].concat()))
}

/// Generates a record, or something similar, by the table in `packed.rs`.
fn record(input: &mut Unstructured<'_>) -> Result<Value> {
    let flat = match input.arbitrary()? {
        true => FlatRecord::from(&records::record(input)?),
        false => records::columns(input)?,
    };
    let packed = |bytes: usize, number: Option<i64>| number.unwrap_or_default().to_be_bytes()[8 - bytes..].to_vec();
    let part = |number: u8, part: Option<Vec<u8>>| match part {
        Some(part) => [vec![number], packed(4, i64::try_from(part.len()).ok()), part].concat(),
        None => Vec::new(),
    };
    let record = [
        packed(2, Some(flat.format)),
        packed(1, Some(flat.state)),
        flat.owner,
        packed(4, Some(flat.attempt)),
        vec![input.arbitrary()?],
        packed(8, Some(flat.expires_at)),
        packed(8, flat.lease_until.or(flat.not_before)),
        packed(2, Some(input.int_in_range(0..=1_000)?)),
        packed(8, Some(flat.created_at)),
        packed(2, Some(flat.fingerprint_algorithm)),
        flat.fingerprint,
        packed(1, flat.acquisition),
        packed(1, flat.takeover),
        packed(2, flat.status),
        packed(4, Some(input.int_in_range(0..=3)?)),
        part(1, flat.checkpoint_name.map(String::into_bytes)),
        part(2, flat.checkpoint_data),
        part(3, flat.headers),
        part(4, flat.body.map(Vec::from)),
        if input.ratio(1, 8)? { part(input.arbitrary()?, Some(vec![7])) } else { Vec::new() },
    ];
    Ok(Value::BulkString(cut(input, record.concat())?))
}

/// Occasionally truncates or extends the bytes.
fn cut(input: &mut Unstructured<'_>, mut packed: Vec<u8>) -> Result<Vec<u8>> {
    if input.ratio(1, 16)? {
        let length = input.int_in_range(0..=packed.len() + 1)?;
        packed.resize(length, 0);
    }
    Ok(packed)
}

fn info(input: &mut Unstructured<'_>) -> Result<Value> {
    let mut text = String::new();
    for _ in 0..input.int_in_range(0..=5)? {
        let name = input.choose(&["redis_version", "role", "db0", "db1", "db", "connected_slaves", "# Server"])?;
        let number = input.arbitrary::<u64>()? >> input.int_in_range(0..=63)?;
        let value = match input.int_in_range(0..=3)? {
            0 => format!("{number}.{}", input.arbitrary::<u32>()?),
            1 => format!("keys={number},expires=0,avg_ttl=0"),
            2 => self::text(input, 12)?,
            _ => number.to_string(),
        };
        text.push_str(&format!("{name}:{value}\r\n"));
    }
    Ok(Value::BulkString(text.into()))
}

fn slots(input: &mut Unstructured<'_>) -> Result<Value> {
    let ranges = (0..input.int_in_range(0..=4)?).map(|_| {
        let node = vec![any_bytes(input)?, number(input)?, any_bytes(input)?];
        Ok(Value::Array(vec![number(input)?, number(input)?, Value::Array(node)]))
    });
    let mut ranges: Vec<Value> = ranges.collect::<Result<_>>()?;
    spoil_one(input, &mut ranges)?;
    Ok(Value::Array(ranges))
}

fn spoil_one(input: &mut Unstructured<'_>, ranges: &mut [Value]) -> Result<()> {
    if let Some(Value::Array(range)) = ranges.last_mut() {
        spoil(input, range)?;
    }
    Ok(())
}

/// Generates any answer of the protocol, a few levels deep.
fn any(input: &mut Unstructured<'_>, depth: usize) -> Result<Value> {
    let kinds = if depth < 3 { 11 } else { 6 };
    let several = |input: &mut Unstructured<'_>| -> Result<Vec<Value>> {
        (0..input.int_in_range(0..=3)?).map(|_| any(input, depth + 1)).collect()
    };
    Ok(match input.int_in_range(0..=kinds)? {
        0 => Value::Nil,
        1 => Value::Int(input.arbitrary()?),
        2 => Value::BulkString(bytes(input, 20)?),
        3 => Value::SimpleString(text(input, 12)?),
        4 => Value::Okay,
        5 => Value::Double(input.arbitrary()?),
        6 => Value::Boolean(input.arbitrary()?),
        7 | 8 => Value::Array(several(input)?),
        9 => Value::Set(several(input)?),
        10 => Value::Map(vec![(any(input, depth + 1)?, any(input, depth + 1)?)]),
        _ => {
            let code = input.choose(&["ERR", "WRONGTYPE", "OOM", "READONLY", "MOVED", "X"])?;
            let line = format!("-{code} {}\r\n", text(input, 12)?.replace(['\r', '\n'], " "));
            redis::parse_redis_value(line.as_bytes()).unwrap_or(Value::Nil)
        }
    })
}
