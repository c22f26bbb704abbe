-- Changes a claimed job, if it was neither delivered again nor reported. Returns whether it was so.
--
-- KEYS: the job, the jobs that are due, the suspects that are due. ARGV: id, the delivery, how many count as lost or -1 for no
-- change, 1 if it stays claimed, how long until it is due in ms or -1 for no change, how many lost deliveries make a suspect.
local job = redis.call('HMGET', KEYS[1], 'delivered', 'claimed')
if job[1] ~= ARGV[2] or job[2] ~= '1' then return 0 end
local due = redis.call('ZSCORE', KEYS[2], ARGV[1]) or redis.call('ZSCORE', KEYS[3], ARGV[1])
if not due then return 0 end
if ARGV[5] ~= '-1' then
    local time = redis.call('TIME')
    due = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[5]
end
if ARGV[3] ~= '-1' then redis.call('HSET', KEYS[1], 'lost', ARGV[3]) end
local lost = tonumber(redis.call('HGET', KEYS[1], 'lost'))
redis.call('HSET', KEYS[1], 'claimed', ARGV[4])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZADD', lost >= tonumber(ARGV[6]) and KEYS[3] or KEYS[2], due, ARGV[1])
return 1
