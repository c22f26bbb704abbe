\set a random(1, 9000000000000000000)
\set b random(1, 9000000000000000000)
INSERT INTO hand_records (key, state, fingerprint, token, expires_at) VALUES (sha256(int8send(:a) || int8send(:b)), 1, sha256('f'), '\x00112233445566778899aabbccddeeff', now() + INTERVAL '1 day') ON CONFLICT DO NOTHING RETURNING 1;
UPDATE hand_records SET state = 2, status = 200, response = convert_to(repeat('x', 512), 'UTF8') WHERE key = sha256(int8send(:a) || int8send(:b)) AND token = '\x00112233445566778899aabbccddeeff' AND state = 1;
