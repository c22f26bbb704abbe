-- Ends jobs: they are not due any more, and are kept for a while.
--
-- KEYS: the jobs that are due, the suspects that are due. ARGV: 1 if they are parked, how long they are kept in ms, the start of
-- the keys of jobs, the ids.
for at = 4, #ARGV do
  if redis.call('ZREM', KEYS[1], ARGV[at]) + redis.call('ZREM', KEYS[2], ARGV[at]) > 0 then
    -- A key of another type in the place of the job is left as it is, and the other jobs end.
    local marked = redis.pcall('HSET', ARGV[3] .. ARGV[at], 'parked', ARGV[1])
    if type(marked) == 'number' then redis.call('PEXPIRE', ARGV[3] .. ARGV[at], ARGV[2]) end
  end
end
return redis.status_reply('OK')
