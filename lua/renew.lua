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
touch(record)
record.till = NOW + tonumber(ARGV[3])
record.ends = record.till + tonumber(ARGV[4])
save(record)
return 1
