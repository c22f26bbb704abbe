-- remove: an entry of just this rank.
--
-- KEYS 1  the entry
-- ARGV 1  microseconds by which the time is moved
--      2  the rank
--      3  the channel on which ends are told
--      4  what is told
--
-- Returns the time.

if rank() == tonumber(ARGV[2]) then
  redis.call('DEL', KEY)
end
tell(ARGV[3], ARGV[4])
return text(NOW)
