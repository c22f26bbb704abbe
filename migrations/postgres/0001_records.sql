-- Distinguishes these records from those of every other schema and database.
CREATE TABLE "idem".idem_identity (
    identity UUID NOT NULL PRIMARY KEY,
    history TEXT
);
INSERT INTO "idem".idem_identity (identity) VALUES (gen_random_uuid());
COMMENT ON TABLE "idem".idem_identity IS 'One row: the identity of the records in this schema.';
COMMENT ON COLUMN "idem".idem_identity.history IS 'The cluster and the timeline that idem check has seen last.';

-- Records of idempotent operations, one row each. Times are microseconds since 1970-01-01T00:00:00Z by the server's
-- clock; the view idem_records_readable shows them as timestamps.
--
-- No indexed column changes while a record lives, so a settlement is a heap-only update and touches no index. That update
-- needs free space on the page: a settled row is larger than one in progress, and while a batch of settlements commits, a
-- page holds both versions of many rows. A fillfactor of 25 leaves room for answers of about 300 bytes. If all operations
-- run in the store's transactions, rows are made settled, and a fillfactor of 90 saves space.
--
-- The table has no CHECK constraint. The server would prepare its expression again for each statement that writes, which took a
-- tenth of the time of a first run's transaction. Readers check each row instead, and refuse one that cannot be a record.
CREATE TABLE "idem".idem_records (
    id BYTEA NOT NULL PRIMARY KEY,
    namespace TEXT NOT NULL,
    principal TEXT,
    operation TEXT NOT NULL,
    format SMALLINT NOT NULL,
    fingerprint_algorithm INTEGER NOT NULL,
    fingerprint BYTEA NOT NULL,
    owner BYTEA NOT NULL,
    attempt BIGINT NOT NULL,
    state SMALLINT NOT NULL,
    acquisition SMALLINT,
    takeover SMALLINT,
    lease_until BIGINT,
    not_before BIGINT,
    checkpoint_name BYTEA,
    checkpoint_data BYTEA,
    status INTEGER,
    headers BYTEA,
    body BYTEA,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    purge_after BIGINT NOT NULL
) WITH (fillfactor = 25);

COMMENT ON TABLE "idem".idem_records IS 'Idempotent operations, one row each; written by idem-postgres.';
COMMENT ON COLUMN "idem".idem_records.id IS 'SHA-256 or HMAC-SHA-256 over (namespace, scope, key).';
COMMENT ON COLUMN "idem".idem_records.namespace IS 'The application''s namespace. For operators: no decision depends on it.';
COMMENT ON COLUMN "idem".idem_records.principal IS 'The tenant that owns the key, for operators. NULL if there is a single tenant.';
COMMENT ON COLUMN "idem".idem_records.operation IS 'What the key protects, such as method and route, for operators.';
COMMENT ON COLUMN "idem".idem_records.format IS 'The format of this row. A version that does not know it must not run the operation again.';
COMMENT ON COLUMN "idem".idem_records.fingerprint_algorithm IS 'How the fingerprint was made.';
COMMENT ON COLUMN "idem".idem_records.fingerprint IS 'The digest of the request that made the record.';
COMMENT ON COLUMN "idem".idem_records.owner IS 'The random token of the run that may change the row, or that settled it. Zeros after a release.';
COMMENT ON COLUMN "idem".idem_records.attempt IS '1 for the first run, larger for every further one.';
COMMENT ON COLUMN "idem".idem_records.state IS '1 in progress, 2 completed, 3 failed permanently, 4 failed with an unknown outcome, 5 failed and retryable.';
COMMENT ON COLUMN "idem".idem_records.acquisition IS 'In progress: 1 fresh, 2 takeover, 3 retry, 4 probe.';
COMMENT ON COLUMN "idem".idem_records.takeover IS 'In progress: what happens after a crash. 1 rerun, 2 outcome unknown, 3 a probe has to find out.';
COMMENT ON COLUMN "idem".idem_records.lease_until IS 'In progress: until when the right to execute holds.';
COMMENT ON COLUMN "idem".idem_records.not_before IS 'Failed and retryable: when the next attempt may begin.';
COMMENT ON COLUMN "idem".idem_records.checkpoint_name IS 'The last recovery point, in UTF-8; binary because a name may hold any character.';
COMMENT ON COLUMN "idem".idem_records.checkpoint_data IS 'The sequence of the last recovery point, in 4 bytes, and what it left for its successor.';
COMMENT ON COLUMN "idem".idem_records.status IS 'The status of the stored answer.';
COMMENT ON COLUMN "idem".idem_records.headers IS 'The header fields of the stored answer: length-prefixed names and values.';
COMMENT ON COLUMN "idem".idem_records.body IS 'The body of the stored answer. NULL in a settled row if it was too large to keep.';
COMMENT ON COLUMN "idem".idem_records.created_at IS 'When the record was made.';
COMMENT ON COLUMN "idem".idem_records.updated_at IS 'When it last changed.';
COMMENT ON COLUMN "idem".idem_records.expires_at IS 'From this time on the row counts as absent and may be purged.';
COMMENT ON COLUMN "idem".idem_records.purge_after IS 'When the purge first looks at the row: never later than expires_at. A settlement does not change it, so it can have an index.';

-- What operators resolved, and why. Written before the record changes; the outcome is added after that.
CREATE TABLE "idem".idem_repairs (
    -- The order of the notes. Clocks can go back.
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The owner of the record, if it was resolved.
    action BYTEA NOT NULL UNIQUE,
    record BYTEA NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    resolution TEXT NOT NULL,
    outcome TEXT,
    at BIGINT NOT NULL
);
COMMENT ON TABLE "idem".idem_repairs IS 'What operators resolved, and why; never purged.';

-- For the purge.
CREATE INDEX idem_records_purge_after ON "idem".idem_records (purge_after);

-- Records for operators. Without headers and bodies, which may hold secrets.
CREATE VIEW "idem".idem_records_readable AS
SELECT
    encode(id, 'hex') AS id,
    namespace,
    principal,
    operation,
    CASE
        WHEN state = 1 AND acquisition <> 4 AND owner = decode(repeat('00', 16), 'hex') THEN 'released, retryable'
        WHEN state = 1 THEN 'in progress'
        WHEN state = 2 THEN 'completed'
        WHEN state = 3 THEN 'failed permanently'
        WHEN state = 4 THEN 'outcome unknown'
        WHEN state = 5 THEN 'failed, retryable'
    END AS state,
    attempt,
    status,
    octet_length(body) AS body_bytes,
    to_timestamp(lease_until / 1e6) AS lease_until,
    to_timestamp(not_before / 1e6) AS not_before,
    encode(checkpoint_name, 'escape') AS checkpoint,
    to_timestamp(created_at / 1e6) AS created_at,
    to_timestamp(updated_at / 1e6) AS updated_at,
    to_timestamp(expires_at / 1e6) AS expires_at
FROM "idem".idem_records;
