-- What all scripts share: this text stands in front of each of them, as one script cannot call another.
--
-- A record is one hash:
--   head                   what decisions are made by, packed (HEAD), so that a script reads and writes it as one value
--   who                    packed (WHO), what stays the same for a run: 32 bytes of the fingerprint's digest, 16 of the
--                          owner token
--   point data             the checkpoint: its name; 4 bytes of its sequence and its data
--   headers body           the answer's; a tombstone has no body
--   asked                  somebody was told that it is in progress, and may wait for its end
--
-- Neither of the packed ones is longer than 64 bytes: up to there Redis keeps a small hash in one piece.
--
-- The head is 45 bytes; numbers begin with their highest byte, times are microseconds since the Unix epoch:
--    0  2  format          1; whoever meets another one refuses, whatever follows
--    2  2  algo            the fingerprint's algorithm
--    4  4  attempt         1 for the first run
--    8  1  state           1 in progress, 2 completed, 3 failed for good, 4 outcome unknown, 5 failed, may be retried
--    9  1  how             in progress: 1 fresh, 2 takeover, 3 retry, 4 probe; else 0
--   10  1  crash           in progress: what a crash means: 1 run again, 2 unknown, 3 probe; else 0
--   11  2  status          the answer's; 0 while in progress
--   13  8  till            in progress: until when the lease holds; may be retried: not before this time; else 0
--   21  8  made            when it came to be
--   29  8  moved           when it last changed
--   37  8  ends            when it counts as absent
--
-- Laws kept here: L9, the server's TIME is the only clock; L10, the key expires with `ends`, which is never before the
-- end of the lease.

local KEY = KEYS[1]
local IN_PROGRESS, COMPLETED, TERMINAL, UNKNOWN, RETRYABLE = 1, 2, 3, 4, 5
local FORMAT = 1
local HEAD, HEAD_BYTES = '>I2I2I4I1I1I1I2I8I8I8I8', 45
local WHO, WHO_BYTES = 'c32c16', 48
local NOBODY = string.rep('\0', 16)
-- The first number above all times; what would reach it is for ever.
local TIME_LIMIT = 9223372036854775808

-- ARGV[1] of every script moves the time: 0 except in tests.
local OFFSET = tonumber(ARGV[1])
local TIME = redis.call('TIME')
local NOW = TIME[1] * 1000000 + TIME[2] + OFFSET

local function text(time)
  return string.format('%.0f', time)
end

-- Whatever cannot be read is an error, and never a reason to run.
local function damaged(what)
  error({ err = 'IDEMDAMAGED the ' .. what .. ' of a record cannot be read' })
end

local function check(is_sound, what)
  if not is_sound then
    damaged(what)
  end
end

-- The record without its answer and its checkpoint; nil when there is none or it counts as absent. The second value
-- says whether there is one all the same.
local function load()
  local fields = redis.call('HMGET', KEY, 'head', 'who', 'asked')
  local head, who = fields[1], fields[2]
  if not head then
    check(redis.call('EXISTS', KEY) == 0, 'head')
    return nil, false
  end
  check(#head >= 2, 'format')
  local format = struct.unpack('>I2', head)
  if format ~= FORMAT then
    error({ err = 'IDEMFORMAT ' .. format })
  end
  check(#head == HEAD_BYTES, 'head')
  check(who and #who == WHO_BYTES, 'owner')
  local record = { asked = fields[3] }
  format, record.algo, record.attempt, record.state, record.how, record.crash, record.status, record.till,
    record.made, record.moved, record.ends = struct.unpack(HEAD, head)
  record.digest, record.owner = struct.unpack(WHO, who)
  if NOW >= record.ends then
    return nil, true
  end
  local state = record.state
  check(record.attempt > 0, 'attempt')
  check(state >= IN_PROGRESS and state <= RETRYABLE, 'state')
  if state == IN_PROGRESS then
    check(record.how >= 1 and record.how <= 4, 'acquisition')
    check(record.crash >= 1 and record.crash <= 3, 'takeover')
  end
  return record, true
end

-- The record as it is stored, in the order in which the store reads it.
local function everything()
  return redis.call('HMGET', KEY, 'head', 'who', 'point', 'data', 'headers', 'body')
end

-- The server may forget the key when the record ends, by its own clock, and not before.
local function expire(ends)
  redis.call('PEXPIREAT', KEY, string.format('%.0f', math.ceil((math.min(ends, TIME_LIMIT) - OFFSET) / 1000)))
end

-- Puts the head in place, and the other fields that are given.
local function write(record, ...)
  local head = struct.pack(HEAD, FORMAT, record.algo, record.attempt, record.state, record.how, record.crash,
    record.status, math.min(record.till, TIME_LIMIT), record.made, NOW, math.min(record.ends, TIME_LIMIT))
  redis.call('HSET', KEY, 'head', head, ...)
end

-- The same, and the key expires with the record.
local function save(record, ...)
  write(record, ...)
  expire(record.ends)
end

-- A write that changes nothing. It takes no memory, so Redis permits it when its memory is full, and whatever follows it in
-- the same script as well: only new keys are refused then, and no owner loses its lease. Whoever awaits replicas
-- after it awaits all that the script has seen.
local function touch(record)
  expire(record.ends)
end
