-- Adds a job, unless there is one with this id. Returns the name of the job that is there.
--
-- KEYS: the job, the jobs that are due. ARGV: id, name, principal with a sign in front, payload, deadline in ms.
local name = redis.call('HGET', KEYS[1], 'name')
if name then return name end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'name', ARGV[2], 'principal', ARGV[3], 'payload', ARGV[4],
    'deadline', now + ARGV[5], 'delivered', 0, 'unreported', 0)
redis.call('ZADD', KEYS[2], now, ARGV[1])
return ARGV[2]
