-- Requests of wrk: each with a key of its own, or keys of a fixed set again and again.
local mode, run = os.getenv("KEYS"), os.getenv("RUN")
local page, body = os.getenv("PAGE"), os.getenv("BODY")
local head = "POST " .. page .. " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\n"
if page ~= "/pay" then
    head = head .. "Authorization: Bearer acme\r\n"
end
local threads, number = 0, 0
-- Global, as each thread has a script of its own and is told this from outside.
thread = 0

function setup(t)
    t:set("thread", threads)
    threads = threads + 1
end

function request()
    number = number + 1
    local of, which = run, number
    if mode == "few" then
        of, which = "the-same-in-all-runs", number % 500
    end
    local key = string.format("%s-%d-%012d", of, thread, which)
    -- The peer keeps its answers in sessions, by 128 bits in base64: one for each key, which is what suits it best.
    local session = string.format("%s%010d%dA", mode == "few" and "0000000000" or run:sub(1, 10), which, thread)
    return head .. "Cookie: session=" .. session .. "\r\nIdempotency-Key: " .. key .. "\r\n\r\n" .. body
end
