-- look: reads the record. If there is none, it can store a new one.
--
-- KEYS 1  the record
-- ARGV 1  1: the answer awaits replicas, so there has to be a write to wait for
--      2  the record in progress to store if there is none, or empty
--      3  how many milliseconds it lasts
--
-- Returns the time before the read, as TIME gives it; the record that was read, or false; the time at which the key
-- expires now, in milliseconds.
--
-- Laws: L1, as no second record is put beside the first; L9, the server's clock is the only one.

local KEY = KEYS[1]
local time, record = redis.call('TIME'), redis.call('GET', KEY)
if not record and ARGV[2] ~= '' then
  redis.call('SET', KEY, ARGV[2], 'PX', ARGV[3])
end
local expires = redis.call('PEXPIRETIME', KEY)
if record and ARGV[1] == '1' and expires > 0 then
  redis.call('PEXPIREAT', KEY, expires)
end
return { time, record, expires }
