"""One client of a peer on Redis, operation after operation: prints operations per second.

    peers.py PEER PORT SECONDS ROUND
"""

import asyncio
import json
import os
import sys
import time

ANSWER = {"id": "0197f3c2-7d1e-7a50-9f2b-3c1d5e6f7a8b", "status": "succeeded", "amount": 1000, "note": "x" * 420}


def powertools(port, seconds, prefix):
    os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "bench")
    os.environ.setdefault("POWERTOOLS_LOG_LEVEL", "CRITICAL")
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer

    persistence = RedisCachePersistenceLayer(client=redis.Redis(port=port, decode_responses=True))
    config = IdempotencyConfig(event_key_jmespath="key")

    @idempotent_function(data_keyword_argument="order", persistence_store=persistence, config=config)
    def pay(order):
        return ANSWER

    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        pay(order={"key": f"{prefix}-{done}", "amount": 1000})
        done += 1
    return done


def asgi(port, seconds, prefix):
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend
    from redis.asyncio import Redis
    from starlette.responses import JSONResponse

    async def pay(scope, receive, send):
        await receive()
        await JSONResponse(ANSWER)(scope, receive, send)

    async def run():
        app = IdempotencyHeaderMiddleware(pay, backend=RedisBackend(redis=Redis(port=port)))
        body = json.dumps({"amount": 1000}).encode()
        statuses = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        done, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            headers = [(b"idempotency-key", f"{prefix}-{done}".encode()), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers}
            await app(scope, receive, send)
            done += 1
        if set(statuses) != {200}:
            sys.exit(f"not all were answered with 200: {set(statuses)}")
        return done

    return asyncio.run(run())


def main():
    peer, port, seconds, turn = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    run = {"aws-lambda-powertools": powertools, "asgi-idempotency-header": asgi}[peer]
    done = run(port, seconds, f"{peer}-{turn}")
    print(done / seconds)


if __name__ == "__main__":
    main()
