-- put: an entry in place of one that has no higher rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  its rank
--      3  until when it is one
--      4  its bytes
--
-- Returns 1, or 0 when nothing was put.

local ends = tonumber(ARGV[3])
local there = rank()
if ends <= NOW or (there and there > tonumber(ARGV[2])) then
  return 0
end
redis.call('SET', KEY, ARGV[2] .. ':' .. ARGV[4], 'PXAT', text(math.ceil((ends - OFFSET) / 1000)))
return 1
