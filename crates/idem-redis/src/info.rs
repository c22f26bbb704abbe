//! Parses what servers report about themselves.

use std::collections::{HashMap, HashSet};

use idem_core::StoreError;
use redis::Value;

use crate::error::unreadable;

/// The fields of `INFO`.
pub(crate) struct Info(HashMap<String, String>);

impl Info {
    pub(crate) fn read(value: Value) -> Result<Self, StoreError> {
        let text: String = redis::from_redis_value(value).map_err(unreadable)?;
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        Ok(Self(pairs.map(|(name, value)| (name.to_owned(), value.trim_end().to_owned())).collect()))
    }

    pub(crate) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub(crate) fn version_number(&self) -> (u32, u32) {
        let mut parts = self.text("redis_version").split('.').map(|part| part.parse().unwrap_or_default());
        (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
    }

    /// The number of keys in all databases, from lines such as `db0:keys=3,expires=3,avg_ttl=0`.
    pub(crate) fn keys(&self) -> u64 {
        let databases = self.0.iter().filter(|(name, _)| name.starts_with("db"));
        let counts =
            databases.filter_map(|(_, value)| value.strip_prefix("keys=")?.split(',').next()?.parse::<u64>().ok());
        counts.fold(0, u64::saturating_add)
    }
}

/// Counts the primaries in a reply of `CLUSTER SLOTS`: a list of slot ranges, each with its primary before its replicas.
pub(crate) fn served_by(slots: Value) -> Result<usize, StoreError> {
    type Node = (Option<String>, u16, String);
    let ranges: Vec<Vec<Value>> = redis::from_redis_value(slots).map_err(unreadable)?;
    let mut primaries = HashSet::new();
    for range in ranges {
        let primary = range.into_iter().nth(2).unwrap_or_default();
        let Value::Array(mut parts) = primary else { return Err(unreadable("a range of slots has no primary")) };
        parts.truncate(3);
        let (_, _, name): Node = redis::from_redis_value(Value::Array(parts)).map_err(unreadable)?;
        primaries.insert(name);
    }
    Ok(primaries.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_of_all_databases_are_counted_as_far_as_numbers_go() {
        let keys = |text: &str| Info::read(Value::BulkString(text.into())).unwrap().keys();
        assert_eq!(keys("db0:keys=3,expires=3,avg_ttl=0\r\ndb5:keys=4,expires=0\r\nrole:master"), 7);
        assert_eq!(keys(&format!("db0:keys={}\r\ndb1:keys=1", u64::MAX)), u64::MAX);
    }
}
