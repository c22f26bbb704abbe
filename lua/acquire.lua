-- acquire: asks for the right to execute, or for the answer. The rows are those of the state machine's table.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--      2  algorithm of the fingerprint     3  its 32 bytes
--      4  owner token, 16 bytes; the script may be sent again with the same one
--      5  lease in microseconds            6  retention in microseconds
--      7  what a crash means (`crash`)     8  attempts that a retryable failure has in all
--      9  1: whoever sends another fingerprint is given the settled answer
--     10  1: whoever is answered awaits replicas
--
-- Returns {'acquired', attempt, how, point, data} · {'in_progress', microseconds} · {'backoff', microseconds} ·
-- {'mismatch', algo} · {'replay', head, who, point, data, headers, body}.
--
-- Laws: L1, L2, L4, L5, L7; L8 by the owner token.

local FRESH, TAKEOVER, RETRY, PROBE = 1, 2, 3, 4
local RERUN, PROBING, LAST_ATTEMPT = 1, 3, 4294967295

local algo, digest, owner = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local retention, takeover = tonumber(ARGV[6]), tonumber(ARGV[7])
local record, is_there = load()

local function acquired(attempt, how)
  local checkpoint = record and redis.call('HMGET', KEY, 'point', 'data') or {}
  return { 'acquired', attempt, how, checkpoint[1] or false, checkpoint[2] or false }
end

-- A new attempt begins: what the record keeps from the one before is its age and its checkpoint.
local function start(attempt, how)
  local answer = acquired(attempt, how)
  if record then
    redis.call('HDEL', KEY, 'headers', 'body', 'asked')
  elseif is_there then
    redis.call('DEL', KEY)
  end
  local lease = NOW + tonumber(ARGV[5])
  save({
    algo = algo, attempt = attempt, state = IN_PROGRESS, how = how, crash = takeover, status = 0, till = lease,
    made = record and record.made or NOW, ends = lease + retention,
  }, 'who', struct.pack(WHO, digest, owner))
  return answer
end

-- The record ends without another run; its owner stays, so that the owner's late settlement is seen to be stale.
local function fail(state, status, ...)
  redis.call('HDEL', KEY, 'point', 'data', 'asked')
  record.state, record.how, record.crash, record.till = state, 0, 0, 0
  record.status, record.ends = status, NOW + retention
  write(record, ...)
  -- It may be over at once, and then the server forgets it at once.
  local answer = { 'replay', unpack(everything()) }
  expire(record.ends)
  return answer
end

if not record then
  return start(1, FRESH)
end
local same_request = record.algo == algo and record.digest == digest
local is_settled = record.state == COMPLETED or record.state == TERMINAL or record.state == UNKNOWN
if not same_request and not (is_settled and ARGV[9] == '1') then
  return { 'mismatch', record.algo }
end
if is_settled or record.owner == owner and record.state == IN_PROGRESS then
  if ARGV[10] == '1' then
    touch(record)
  end
  return is_settled and { 'replay', unpack(everything()) } or acquired(record.attempt, record.how)
end
local next_attempt = record.attempt < LAST_ATTEMPT and record.attempt + 1
if record.state == RETRYABLE then
  if NOW < record.till then
    return { 'backoff', text(record.till - NOW) }
  elseif next_attempt and record.attempt < tonumber(ARGV[8]) then
    return start(next_attempt, RETRY)
  end
  return fail(TERMINAL, record.status)
end
if NOW < record.till then
  -- A hint, which may fail when the memory is full.
  if not record.asked then
    redis.pcall('HSET', KEY, 'asked', '1')
  end
  return { 'in_progress', text(record.till - NOW) }
end
-- It may run again only if both say so; else whoever can find out must.
if next_attempt and takeover == PROBING then
  return start(next_attempt, PROBE)
elseif next_attempt and record.crash == RERUN and takeover == RERUN then
  return start(next_attempt, TAKEOVER)
end
return fail(UNKNOWN, 504, 'headers', '', 'body', '')
