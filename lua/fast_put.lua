-- put: stores an entry, unless the stored one has a higher rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  its rank
--      3  the time at which it ends
--      4  its bytes
--
-- Returns the time.

local ends = tonumber(ARGV[3])
local there = rank()
if ends > NOW and not (there and there > tonumber(ARGV[2])) then
  redis.call('SET', KEY, ARGV[2] .. ':' .. ARGV[4], 'PXAT', text(math.ceil((ends - OFFSET) / 1000)))
end
return text(NOW)
