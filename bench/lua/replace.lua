-- What a careful team writes by hand beside a native `SET … NX GET PX`: a string that begins with its owner's token is replaced by
-- its owner only. The state is not looked at, so that one key can be settled again and again.
if redis.call('GETRANGE', KEYS[1], 0, 15) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
return 1
