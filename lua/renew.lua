-- renew: the owner's lease counts from now.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--      2  owner token
--      3  lease in microseconds            4  retention in microseconds
--
-- Returns 1 when it is applied, 0 when the lease is lost.
--
-- Laws: L3; L8, as a repeat gives the same lease.

local record = load()
if not record or record.owner == NOBODY or record.owner ~= ARGV[2] or record.state ~= IN_PROGRESS then
  return 0
end
local lease = NOW + tonumber(ARGV[3])
local ends = lease + tonumber(ARGV[4])
touch(record)
redis.call('HSET', KEY, 'lease', text(lease), 'moved', text(NOW), 'ends', text(ends))
expire(ends)
return 1
