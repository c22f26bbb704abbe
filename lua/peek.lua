-- peek: the record as it stands. Changes nothing.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--      2  1: whoever is answered awaits replicas
--
-- Returns how many microseconds are left of its life, and the fields of `everything`; or nil when there is no record or it
-- counts as absent.
--
-- Laws: L9.

local record = load()
if record and ARGV[2] == '1' then
  touch(record)
end
if not record then
  return nil
end
local answer = everything()
table.insert(answer, 1, text(record.ends - NOW))
return answer
