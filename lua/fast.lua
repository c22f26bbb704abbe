-- What the scripts of the fast store share: this text stands in front of each of them.
--
-- An entry is one string: its rank in digits, a colon, and bytes that mean nothing here. Whatever else is found under the
-- key is as good as nothing. Times are microseconds since the Unix epoch.

local KEY = KEYS[1]

-- ARGV[1] of every script moves the time: 0 except in tests.
local OFFSET = tonumber(ARGV[1])
local TIME = redis.call('TIME')
local NOW = TIME[1] * 1000000 + TIME[2] + OFFSET

local function text(time)
  return string.format('%.0f', time)
end

-- The highest rank, of 64 bits.
local HIGHEST = 18446744073709551615

-- The rank of the entry that is there; nil when there is none.
local function rank()
  -- Somebody may have put a list there.
  local beginning = redis.pcall('GETRANGE', KEY, 0, 20)
  if type(beginning) ~= 'string' then
    return nil
  end
  local digits = string.match(beginning, '^(%d+):')
  local there = digits and tonumber(digits)
  return there and there <= HIGHEST and there or nil
end

-- Where there is no entry, puts a claim in its place; 0 milliseconds are none.
local function claim(milliseconds)
  if milliseconds ~= '0' and not rank() then
    redis.call('SET', KEY, '0:', 'PX', milliseconds)
  end
end
