-- Looks a job up: name, principal, payload, trace, ms until the deadline, age in ms, and 0 if it waits, 1 claimed, 2 ended, 3 parked.
--
-- KEYS: the job, the jobs that are due, the suspects that are due. ARGV: id.
local job = redis.call('HMGET', KEYS[1], 'name', 'principal', 'payload', 'deadline', 'claimed', 'parked', 'created', 'trace')
if not job[1] then return nil end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = redis.call('ZSCORE', KEYS[2], ARGV[1]) or redis.call('ZSCORE', KEYS[3], ARGV[1])
local standing = 0
if not due then
    standing = job[6] == '1' and 3 or 2
elseif job[5] == '1' and tonumber(due) > now then
    standing = 1
end
return { job[1], job[2], job[3], job[8] or '', job[4] - now, now - job[7], standing }
