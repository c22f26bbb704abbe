-- look: what is there.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--
-- Returns the time and the string, or false in its place.

local there = redis.pcall('GET', KEY)
return { text(NOW), type(there) == 'string' and there }
