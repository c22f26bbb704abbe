-- replace: replaces or removes a record, if it has not changed.
--
-- KEYS 1  the record
-- ARGV 1  its first bytes, and
--      2  the time at which its key expires, in milliseconds, as they were when it was looked at
--      3  the new record, or empty: the record is removed
--      4  the time at which the key expires then
--      5  the channel for waiters, or empty
--
-- Returns 1 if it was replaced, 0 if it had changed.
--
-- Laws: L3; L8, as a repeat finds its own record.

local KEY = KEYS[1]
local is_same = redis.call('GETRANGE', KEY, 0, #ARGV[1] - 1) == ARGV[1]
if not is_same or redis.call('PEXPIRETIME', KEY) ~= tonumber(ARGV[2]) then
  return 0
end
-- While its memory is full, Redis permits a write that takes none, and then all writes that follow in the same script.
redis.call('PEXPIREAT', KEY, ARGV[2])
if ARGV[3] == '' then
  redis.call('DEL', KEY)
else
  redis.call('SET', KEY, ARGV[3], 'PXAT', ARGV[4])
end
-- Only a hint: without permission to publish, the change still holds.
if ARGV[5] ~= '' then
  redis.pcall('PUBLISH', ARGV[5], KEY)
end
return 1
