-- remove: an entry of just this rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  the rank
--      3  how many milliseconds a claim in its place lasts; 0 for none
--      4  the channel on which removals are told
--      5  what is told
--
-- Returns the time.

if rank() == tonumber(ARGV[2]) then
  redis.call('DEL', KEY)
end
claim(ARGV[3])
-- Without permission to publish, whoever waits looks from time to time.
redis.pcall('PUBLISH', ARGV[4], ARGV[5])
return text(NOW)
