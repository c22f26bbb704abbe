-- settle: the owner ends its run.
--
-- KEYS 1  the record
-- ARGV 1  microseconds by which the time is moved
--      2  owner token
--      3  the state that it leads to (2, 3, 4 or 5), or 0 to release the record
--      4  retention in microseconds
--      5  microseconds until it may be retried, for state 5
--      6  status       7  header fields, encoded       8  body       9  1: the body is not retained
--     10  1: whoever is answered awaits replicas
--     11  the channel that tells waiters
--
-- Returns 1 when it is applied, or was applied before; 0 when the lease is lost.
--
-- Laws: L2, L3; L8: a repeated settlement is recognised by its owner and by what it says.

local RELEASED = 0
local RERUN, PROBE = 1, 4

local settlement = tonumber(ARGV[3])
local body = ARGV[8]
if ARGV[9] == '1' then
  body = false
end

-- Whether this is the settlement that led to the record's state. The time of a backoff is not compared: a repeat is
-- later.
local function is_settled_so(record)
  if record.state ~= settlement then
    return false
  end
  local answer = redis.call('HMGET', KEY, 'headers', 'body')
  local is_same = record.status == tonumber(ARGV[6]) and answer[1] == ARGV[7] and answer[2] == body
  return settlement == UNKNOWN or is_same
end

-- Gone, as if it had never been, unless an earlier run may have had effects. The record then belongs to nobody and its
-- lease is over, so that the next acquire takes it over at once.
local function give_back(record)
  local ran_before
  if record.crash == RERUN then
    ran_before = record.attempt > 1 or redis.call('HEXISTS', KEY, 'point') == 1
  else
    ran_before = record.how == PROBE
  end
  if ran_before then
    touch(record)
    record.till = math.min(record.till, NOW)
    save(record, 'who', struct.pack(WHO, record.digest, NOBODY))
  else
    redis.call('DEL', KEY)
  end
end

local function end_run(record)
  record.state, record.how, record.crash, record.status = settlement, 0, 0, tonumber(ARGV[6])
  -- What is to run again needs what it left behind, and must not be forgotten before its time has come.
  if settlement == RETRYABLE then
    redis.call('HDEL', KEY, 'asked')
    record.till = NOW + tonumber(ARGV[5])
    record.ends = record.till + tonumber(ARGV[4])
  else
    redis.call('HDEL', KEY, 'asked', 'point', 'data')
    record.till = 0
    record.ends = NOW + tonumber(ARGV[4])
  end
  if body then
    save(record, 'headers', ARGV[7], 'body', body)
  else
    save(record, 'headers', ARGV[7])
  end
end

local record = load()
if not record or record.owner == NOBODY then
  return settlement == RELEASED and 1 or 0
end
if record.owner ~= ARGV[2] then
  return 0
end
if record.state ~= IN_PROGRESS then
  if not is_settled_so(record) then
    return 0
  end
  if ARGV[10] == '1' then
    touch(record)
  end
  return 1
end
if settlement == RELEASED then
  give_back(record)
else
  end_run(record)
end
-- A hint, and it is settled by now: a user who may not publish settles all the same.
if record.asked then
  redis.pcall('PUBLISH', ARGV[11], KEY)
end
return 1
