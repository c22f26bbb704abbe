-- remove: an entry of just this rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  the rank
--      3  the channel on which removals are told
--      4  what is told
--
-- Returns the time.

if rank() == tonumber(ARGV[2]) then
  redis.call('DEL', KEY)
  -- Without permission to publish, whoever waits looks from time to time.
  redis.pcall('PUBLISH', ARGV[3], ARGV[4])
end
return text(NOW)
