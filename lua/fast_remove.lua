-- remove: removes the entry if it has exactly this rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  the rank
--      3  how many milliseconds a claim in its place lasts; 0 for none
--      4  the channel for removals, other than those of claims
--      5  the message on that channel
--
-- Returns the time.

if rank() == tonumber(ARGV[2]) then
  redis.call('DEL', KEY)
end
claim(ARGV[3])
if ARGV[2] ~= '0' then
  -- Without permission to publish, waiters poll.
  redis.pcall('PUBLISH', ARGV[4], ARGV[5])
end
return text(NOW)
