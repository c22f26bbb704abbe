-- settle: an owner ends its run for good. What it does not know of its record stays: the fingerprint and the age.
--
-- KEYS 1  the record
-- ARGV 1  the first 23 bytes of a record in progress that is its own: format, state, owner, attempt
--      2  the settled record up to its times       3  and from the end of its fingerprint on
--      4  how many microseconds it lasts           5  the channel on which waiters are told
--
-- Returns 1 when it is settled, 0 when the record does not begin so.
--
-- Laws: L2, L3; L9, the server's clock is the only one; L10, the key expires when the record ends, and not before.

local KEY = KEYS[1]
local record, expires = redis.call('GET', KEY), redis.call('PEXPIRETIME', KEY)
if not record or #record < 88 or expires < 0 or string.sub(record, 1, 23) ~= ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local life, _, age, slack = struct.unpack('>i8i8i8I2', record, 25)
local changed = expires * 1000 - slack - life
local now = math.max(time[1] * 1000000 + time[2], changed)
age = age + now - changed
local ends = now + ARGV[4]
local expires_then = math.ceil(ends / 1000)
local times = struct.pack('>i8i8i8I2', ARGV[4], 0, age, expires_then * 1000 - ends)
local settled = ARGV[2] .. times .. string.sub(record, 51, 84) .. ARGV[3]
expires_then = string.format('%.0f', expires_then)
if redis.pcall('SET', KEY, settled, 'PXAT', expires_then).err then
  -- The memory may be full. A write that takes none permits what follows it.
  redis.call('PEXPIREAT', KEY, expires)
  redis.call('SET', KEY, settled, 'PXAT', expires_then)
end
-- A hint: a user who may not publish settles all the same.
if string.byte(record, 24) == 1 then
  redis.pcall('PUBLISH', ARGV[5], KEY)
end
return 1
