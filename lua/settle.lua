-- settle: an owner ends its run. The record keeps what the owner does not know: when it was made, and its fingerprint.
--
-- KEYS 1  the record
-- ARGV 1  the first 23 bytes of the owner's record in progress: format, state, owner, attempt
--      2  the settled record up to the time when it was made, and
--      3  from the end of its fingerprint on
--      4  how many milliseconds it lasts           5  the channel for waiters
--      6  microseconds by which the time is moved, or empty
--
-- Returns 1 if it was settled, 0 if the record does not begin with ARGV 1.
--
-- Laws: L2, L3; L9, the server's clock is the only one; L10, the key expires when the record ends, and not before.

local KEY = KEYS[1]
local record = redis.call('GET', KEY)
if not record or #record < 92 or string.sub(record, 1, 23) ~= ARGV[1] then
  return 0
end
local kept = string.sub(record, 43, 84)
if string.sub(kept, 1, 8) == '\0\0\0\0\0\0\0\0' then
  local expires = redis.call('PEXPIRETIME', KEY)
  if expires < 0 then
    return 0
  end
  local life, _, slack = struct.unpack('>i8i8I2', record, 25)
  kept = struct.pack('>i8', expires * 1000 - slack - life + (ARGV[6] or 0)) .. string.sub(record, 51, 84)
end
local settled = ARGV[2] .. kept .. ARGV[3]
if redis.pcall('SET', KEY, settled, 'PX', ARGV[4]).err then
  -- The memory may be full. A write that takes none permits the writes after it.
  redis.call('PEXPIREAT', KEY, redis.call('PEXPIRETIME', KEY))
  redis.call('SET', KEY, settled, 'PX', ARGV[4])
end
-- Only a hint: without permission to publish, the settlement still holds.
if string.byte(record, 24) == 1 then
  redis.pcall('PUBLISH', ARGV[5], KEY)
end
return 1
