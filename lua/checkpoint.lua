-- checkpoint: records a recovery point in place of an earlier one.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--      2  owner token
--      3  its name                         4  its sequence in 4 bytes, and its data
--
-- Returns 1 when it is applied, 0 when the lease is lost, or a later checkpoint is there.
--
-- Laws: L3; L8, as a repeat writes the same.

local record = load()
if not record or record.owner == NOBODY or record.owner ~= ARGV[2] or record.state ~= IN_PROGRESS then
  return 0
end
touch(record)
local data = redis.call('HGET', KEY, 'data')
check(not data or #data >= 4, 'checkpoint')
-- What is there is the same, or does not precede this one.
if data and struct.unpack('>I4', data) >= struct.unpack('>I4', ARGV[4]) then
  return data == ARGV[4] and redis.call('HGET', KEY, 'point') == ARGV[3] and 1 or 0
end
save(record, 'point', ARGV[3], 'data', ARGV[4])
return 1
