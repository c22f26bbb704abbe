-- Shared beginning of the fast store's scripts.
--
-- An entry is one string: its rank in digits, a colon, and bytes that the scripts do not read. Every other value under the
-- key counts as no entry. Times are microseconds since the Unix epoch.

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

-- The rank of the stored entry; nil if there is none.
local function rank()
  -- Another program may have stored a list.
  local beginning = redis.pcall('GETRANGE', KEY, 0, 20)
  if type(beginning) ~= 'string' then
    return nil
  end
  local digits = string.match(beginning, '^(%d+):')
  local there = digits and tonumber(digits)
  return there and there <= HIGHEST and there or nil
end

-- Stores a claim if there is no entry. 0 milliseconds: no claim.
local function claim(milliseconds)
  if milliseconds ~= '0' and not rank() then
    redis.call('SET', KEY, '0:', 'PX', milliseconds)
  end
end
