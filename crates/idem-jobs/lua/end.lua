-- Ends a job: it is not due any more, and is kept for a while.
--
-- KEYS: the job, the jobs that are due, the suspects that are due. ARGV: id, 1 if it is parked, how long it is kept in ms.
if redis.call('ZREM', KEYS[2], ARGV[1]) + redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'parked', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
