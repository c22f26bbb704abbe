//! Fuzzes the answers of Redis. A valid answer is read as what it means; any other answer is an error that is not retried, and
//! never a decision.
//!
//! An input is an answer in the wire protocol (RESP), which the driver parses. After a zero byte, it is a list of choices that
//! generate an answer which is valid or nearly so.

mod expected;
mod made_up;

use idem_core::{RecordId, StoreError, StoreErrorKind};
use redis::Value;

use crate::error::{Failure, Phase};
use crate::info::{self, Info};
use crate::keys::Keys;
use crate::reply;
use crate::seen::{Found, Seen};

pub(crate) fn check(input: &[u8]) {
    let value = match input.strip_prefix(b"\0") {
        Some(rest) => made_up::answer(rest).ok(),
        // The driver closes the connection if it cannot parse an answer.
        None => redis::parse_redis_value(input).ok(),
    };
    if let Some(value) = value {
        a_record_is_read_as_it_was_written(&value);
        the_fast_store_reads_what_it_means(&value);
        what_servers_say_of_themselves_is_read_or_refused(&value);
        an_error_of_the_server_is_an_error(value);
    }
    a_key_is_that_of_its_record_only(input);
}

fn read<T>(what: &str, result: Result<T, StoreError>, expected: Option<T>) -> Option<T>
where
    T: PartialEq + std::fmt::Debug,
{
    let read = match result {
        Ok(read) => Some(read),
        Err(error) => {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error:?}");
            assert!(!error.is_retryable() && !error.is_indeterminate(), "{what}: {error:?}");
            None
        }
    };
    assert_eq!(read, expected, "{what}");
    read
}

fn a_record_is_read_as_it_was_written(value: &Value) {
    let values = match value {
        Value::Array(values) => values.clone(),
        value => vec![value.clone()],
    };
    let seen = Seen::read(values.clone(), None, None, 0).map(|seen| {
        seen.map(|seen| match seen.found {
            Found::Record(stored) => (seen.now, Some(stored.record)),
            Found::Nothing | Found::Begun => (seen.now, None),
        })
    });
    read("look", seen, expected::seen(&values));
    read("replace", reply::is_changed(&values), expected::is_changed(&values));
}

fn the_fast_store_reads_what_it_means(value: &Value) {
    read("get", reply::fast_read(value.clone()), expected::fast_read(value));
    read("time", reply::time(value), expected::time(value));
}

fn what_servers_say_of_themselves_is_read_or_refused(value: &Value) {
    match Info::read(value.clone()) {
        Ok(info) => {
            // They are reports for people, and no decision depends on them.
            let _ = (info.keys(), info.version_number(), info.text("role"));
        }
        Err(error) => assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error:?}"),
    }
    match (info::served_by(value.clone()), value) {
        (Ok(primaries), Value::Array(ranges) | Value::Set(ranges)) => {
            assert!(primaries <= ranges.len(), "{primaries} in {value:?}");
        }
        (Ok(_), _) => {}
        (Err(error), _) => assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error:?}"),
    }
}

fn an_error_of_the_server_is_an_error(value: Value) {
    let Err(error) = value.extract_error() else { return };
    let is_about_a_record = matches!(error.code(), Some("WRONGTYPE"));
    for may_have_run in [false, true] {
        let error = Failure::Failed { error: error.clone(), may_have_run }.of("acquire", Phase::Serving);
        assert_eq!(error.kind() == StoreErrorKind::Corrupt, is_about_a_record, "{error:?}");
        assert!(!may_have_run || error.is_indeterminate(), "{error:?}");
    }
    let unconnected = Failure::NotConnected { error, was_sent: true }.of("acquire", Phase::Serving);
    assert!(unconnected.is_indeterminate(), "{unconnected:?}");
}

/// Checks that a key maps to its own record only: notices name records by their keys.
fn a_key_is_that_of_its_record_only(input: &[u8]) {
    let keys = Keys::new("idem:");
    if let Some(id) = keys.id(input) {
        assert!(keys.of(&id).as_bytes().eq_ignore_ascii_case(input), "{id} for {}", input.escape_ascii());
    }
    let id = RecordId::from_bytes(std::array::from_fn(|at| input.get(at).copied().unwrap_or_default()));
    assert_eq!(keys.id(keys.of(&id).as_bytes()), Some(id));
    assert_eq!(keys.id(keys.fast(&id).as_bytes()), None);
    assert_eq!(keys.id(keys.channel().as_bytes()), None);
    assert_eq!(keys.id(keys.repairs().as_bytes()), None);
    assert!(keys.pattern().ends_with("{*}"));
}
