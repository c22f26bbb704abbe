\set a random(1, 9000000000000000000)
\set b random(1, 9000000000000000000)
BEGIN;
WITH written AS (INSERT INTO ledger (account, amount, memo) VALUES (:a, 100, 'pay') RETURNING id) INSERT INTO same_records (id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state, status, headers, body, created_at, updated_at, expires_at, purge_after) SELECT sha256(int8send(:a) || int8send(:b)), 'bench', 'tenant-4711', 'POST /pay', 1, 1, sha256('f'), '\x00112233445566778899aabbccddeeff', 1, 2, 200, convert_to(repeat('h', 40), 'UTF8'), convert_to(repeat('x', 512), 'UTF8'), at, at, at + 86400000000, at + 86400000000 FROM (SELECT (extract(epoch FROM now()) * 1000000)::BIGINT AS at) AS clock ON CONFLICT DO NOTHING RETURNING 1;
COMMIT;
