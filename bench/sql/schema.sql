-- What a careful team writes by hand: a key, its request, its owner, its answer.
CREATE TABLE hand_records (
    key BYTEA PRIMARY KEY,
    state SMALLINT NOT NULL,
    fingerprint BYTEA NOT NULL,
    token BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    expires_at TIMESTAMPTZ NOT NULL,
    status SMALLINT,
    response BYTEA
);
CREATE TABLE hand_replays (LIKE hand_records INCLUDING ALL);
CREATE TABLE ledger (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    memo TEXT,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
INSERT INTO hand_replays
    SELECT sha256(int8send(number)), 2, sha256('f'), '\x00112233445566778899aabbccddeeff', now(), now() + INTERVAL '1 day',
        200, convert_to(repeat('x', 512), 'UTF8')
    FROM generate_series(1::BIGINT, 100000) AS number;
VACUUM ANALYZE hand_replays;
