-- What a careful team writes by hand: a hash for each key, made by whoever comes first.
if redis.call('EXISTS', KEYS[1]) == 1 then return redis.call('HMGET', KEYS[1], 'state', 'fingerprint', 'status', 'response') end
redis.call('HSET', KEYS[1], 'state', 'in_progress', 'fingerprint', ARGV[1], 'token', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
