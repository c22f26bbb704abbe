-- Makes a claimed job due later, if it was not delivered again. Returns whether it was not.
--
-- KEYS: the job, the jobs that are due, the suspects that are due. ARGV: id, the delivery, how long in ms, -1 if this is a report, 0 if not,
-- how many unreported deliveries make a suspect.
if redis.call('HGET', KEYS[1], 'delivered') ~= ARGV[2] then return 0 end
if redis.call('ZREM', KEYS[2], ARGV[1]) + redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
local unreported = redis.call('HINCRBY', KEYS[1], 'unreported', ARGV[4])
local into = unreported >= tonumber(ARGV[5]) and KEYS[3] or KEYS[2]
local time = redis.call('TIME')
redis.call('ZADD', into, time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
return 1
