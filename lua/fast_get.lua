-- get: reads the entry. If there is none, it can store a claim.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  how many milliseconds a claim lasts; 0 for none
--
-- Returns the time and the string, or false in its place.

-- No entry is longer. To send a longer value would block all other clients.
local LONGEST = 67108864

local length = redis.pcall('STRLEN', KEY)
local there = type(length) == 'number' and length <= LONGEST and redis.call('GET', KEY)
claim(ARGV[2])
return { text(NOW), there }
