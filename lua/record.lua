-- What all scripts share: this text stands in front of each of them, as one script cannot call another.
--
-- A record is one hash. Its fields, with times in microseconds since the Unix epoch:
--   format                 1; whoever meets another one refuses
--   algo digest            the fingerprint: its algorithm, its 32 bytes
--   owner attempt          16 bytes of the owner token; 1 for the first run
--   state                  1 in progress, 2 completed, 3 failed for good, 4 outcome unknown, 5 failed, may be retried
--   how crash lease        in progress: how it was acquired (1 fresh, 2 takeover, 3 retry, 4 probe), what a crash
--                          means (1 run again, 2 unknown, 3 probe), until when the lease holds
--   after                  may be retried: not before this time
--   point data             the checkpoint: its name and its data
--   status headers body    the answer; a tombstone has no body
--   made moved ends        when it came to be, when it last changed, from when on it counts as absent
--   asked                  somebody was told that it is in progress, and may wait for its end
--
-- Laws kept here: L9, the server's TIME is the only clock; L10, the key expires with `ends`, which is never before the
-- end of the lease.

local KEY = KEYS[1]
local IN_PROGRESS, COMPLETED, TERMINAL, UNKNOWN, RETRYABLE = 1, 2, 3, 4, 5
local NOBODY = string.rep('\0', 16)
-- The first number above all times; what would reach it is for ever.
local TIME_LIMIT = 9223372036854775808

-- ARGV[1] of every script moves the time: 0 except in tests.
local OFFSET = tonumber(ARGV[1])
local TIME = redis.call('TIME')
local NOW = TIME[1] * 1000000 + TIME[2] + OFFSET

local function text(time)
  if time >= TIME_LIMIT then
    return '9223372036854775807'
  end
  return string.format('%.0f', time)
end

-- Whatever cannot be read is an error, and never a reason to run.
local function number(field, value)
  if not (value and string.find(value, '^%d+$')) then
    error({ err = 'IDEMDAMAGED the field ' .. field .. ' of a record cannot be read' })
  end
  return tonumber(value)
end

-- The record without its answer and its checkpoint; nil when there is none or it counts as absent. The second value
-- says whether there is one all the same.
local function load()
  local fields = redis.call('HMGET', KEY, 'format', 'ends', 'state', 'owner', 'attempt', 'algo', 'digest',
    'how', 'crash', 'lease', 'after', 'asked', 'made')
  if not fields[1] then
    if redis.call('EXISTS', KEY) == 1 then
      number('format', nil)
    end
    return nil, false
  end
  if fields[1] ~= '1' then
    error({ err = 'IDEMFORMAT ' .. fields[1] })
  end
  local record = {
    ends = number('ends', fields[2]), state = number('state', fields[3]), owner = fields[4],
    attempt = number('attempt', fields[5]), algo = fields[6], digest = fields[7], asked = fields[12], made = fields[13],
  }
  if NOW >= record.ends then
    return nil, true
  end
  if not (record.owner and #record.owner == 16 and record.algo and record.digest and #record.digest == 32) then
    number('owner, algo or digest', nil)
  end
  if record.state == IN_PROGRESS then
    record.how, record.crash = number('how', fields[8]), number('crash', fields[9])
    record.lease = number('lease', fields[10])
  elseif record.state == RETRYABLE then
    record.after = number('after', fields[11])
  elseif record.state ~= COMPLETED and record.state ~= TERMINAL and record.state ~= UNKNOWN then
    number('state', nil)
  end
  return record, true
end

-- The whole record, in the order in which the store reads it.
local function everything()
  return redis.call('HMGET', KEY, 'format', 'algo', 'digest', 'owner', 'attempt', 'state', 'how', 'crash', 'lease',
    'after', 'point', 'data', 'status', 'headers', 'body', 'made', 'moved', 'ends')
end

-- The server may forget the key when the record ends, by its own clock, and not before.
local function expire(ends)
  redis.call('PEXPIREAT', KEY, string.format('%.0f', math.ceil((math.min(ends, TIME_LIMIT) - OFFSET) / 1000)))
end

-- A write that changes nothing. It takes no memory, so Redis permits it when its memory is full, and whatever follows it in
-- the same script as well: only new keys are refused then, and no owner loses its lease. Whoever awaits replicas
-- after it awaits all that the script has seen.
local function touch(record)
  expire(record.ends)
end
