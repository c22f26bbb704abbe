-- Claims jobs that are due, the oldest first. The deliveries of those that are no suspects count as lost from now on.
--
-- KEYS: the jobs that are due, the suspects that are due. ARGV: how many of the first at most, how many of the second, how long
-- they are held in ms, the start of the keys of jobs, how many lost deliveries make a suspect.
-- Returns for each job: id, name, principal, payload, trace, delivered, lost before, 1 if it is a suspect, ms until the deadline,
-- age in ms.
-- And the ids of damaged jobs, which are not due any more.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed, damaged = {}, {}
local function claim(from, most, suspect)
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', from, '-inf', now, 'LIMIT', 0, most)) do
        local key = ARGV[4] .. id
        -- A key of another type in the place of the job gives an error, which has no fields.
        local job = redis.pcall('HMGET', key, 'name', 'principal', 'payload', 'deadline', 'created', 'delivered', 'lost',
            'trace')
        local is_whole = job[1] and job[2] and job[3]
        for number = 4, 7 do is_whole = is_whole and tonumber(job[number]) end
        redis.call('ZREM', from, id)
        if not is_whole then
            damaged[#damaged + 1] = id
        else
            local delivered = redis.call('HINCRBY', key, 'delivered', 1)
            local lost = redis.call('HINCRBY', key, 'lost', 1 - suspect)
            redis.call('HSET', key, 'claimed', 1)
            redis.call('ZADD', lost >= tonumber(ARGV[5]) and KEYS[2] or KEYS[1], now + ARGV[3], id)
            claimed[#claimed + 1] =
                { id, job[1], job[2], job[3], job[8] or '', delivered, lost - 1 + suspect, suspect, job[4] - now, now - job[5] }
        end
    end
end
-- First the suspects: a job that becomes one now is not claimed twice.
claim(KEYS[2], ARGV[2], 1)
claim(KEYS[1], ARGV[1], 0)
return { claimed, damaged }
