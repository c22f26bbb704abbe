//! Makes time pass for some keys only.

use std::time::Duration;

use super::command::{RedisAddress, redis_command};
use crate::Error;

/// Collects the keys first, because a change would move other keys in the scan.
const BRING_FORWARD: &str = "
local cursor, keys = '0', {}
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do keys[#keys + 1] = key end
until cursor == '0'
for _, key in ipairs(keys) do
  local expires = redis.call('PEXPIRETIME', key)
  if expires >= 0 then
    redis.call('PEXPIREAT', key, string.format('%.0f', math.max(1, expires - ARGV[2])))
  end
end
return 0";

/// Makes every key with a prefix expire sooner. If all times of a record follow from the expiry of its key, this is as if that
/// much time had passed.
///
/// # Errors
///
/// Those of [`redis_command`].
pub fn redis_expire_sooner(server: impl Into<RedisAddress>, prefix: &str, by: Duration) -> Result<(), Error> {
    let by_ms = i64::try_from(by.as_millis()).unwrap_or(i64::MAX).to_string();
    redis_command(server, &["EVAL", BRING_FORWARD, "0", &format!("{prefix}*"), &by_ms]).map(drop)
}
