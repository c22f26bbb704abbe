-- Adds a job, unless there is one with this id. Returns nothing, or of the job that is there: name, payload, the run that called last.
--
-- KEYS: the job, the jobs that are due, the suspects that are due.
-- ARGV: id, name, principal with a sign in front, payload, the run, deadline in ms, trace.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local before = redis.call('HMGET', KEYS[1], 'name', 'payload', 'by')
if before[1] then
    redis.call('HSET', KEYS[1], 'by', ARGV[5])
    -- Only the end of a job takes it out of both, and leaves a mark. If it has none, something else has removed the entry.
    local due = redis.call('ZSCORE', KEYS[2], ARGV[1]) or redis.call('ZSCORE', KEYS[3], ARGV[1])
    if not due and redis.call('HEXISTS', KEYS[1], 'parked') == 0 then redis.call('ZADD', KEYS[2], now, ARGV[1]) end
    return before
end
redis.call('HSET', KEYS[1], 'name', ARGV[2], 'principal', ARGV[3], 'payload', ARGV[4], 'by', ARGV[5], 'trace', ARGV[7],
    'created', now, 'deadline', now + ARGV[6], 'delivered', 0, 'lost', 0, 'claimed', 0)
redis.call('ZADD', KEYS[2], now, ARGV[1])
return nil
