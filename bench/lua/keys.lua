-- Requests of wrk: each with a key of its own, or keys of a fixed set again and again.
local mode, run = os.getenv("KEYS"), os.getenv("RUN")
local body = '{"amount":1000,"currency":"EUR","account":"acc_000001","memo":"hello"}'
local head = "POST /pay HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\n"
local threads, number = 0, 0
-- Global, as each thread has a script of its own and is told this from outside.
thread = 0

function setup(t)
    t:set("thread", threads)
    threads = threads + 1
end

function request()
    number = number + 1
    local key
    if mode == "few" then
        key = string.format("replay-%d-%08d", thread, number % 500)
    else
        key = string.format("%s-%d-%012d", run, thread, number)
    end
    -- The peer keeps its answers in sessions: one for each key, which is what suits it best.
    return head .. "Cookie: session=" .. string.format("%021dA", mode == "few" and thread * 500 + number % 500 or number) ..
        "\r\nIdempotency-Key: " .. key .. "\r\n\r\n" .. body
end
