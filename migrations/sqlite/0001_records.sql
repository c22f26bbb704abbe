-- Distinguishes this database from every other one.
CREATE TABLE main.idem_identity (
    identity BLOB NOT NULL PRIMARY KEY CHECK (length(identity) = 16)
) STRICT;
INSERT INTO main.idem_identity (identity) VALUES (randomblob(16));

-- Records of idempotent operations, one row each. Times are microseconds since 1970-01-01T00:00:00Z.
CREATE TABLE main.idem_records (
    -- SHA-256 or HMAC-SHA-256 over (namespace, scope, key).
    id BLOB NOT NULL PRIMARY KEY CHECK (length(id) = 32),
    -- What the id was made from, for operators: no decision depends on these. A single-tenant scope has no principal.
    namespace TEXT NOT NULL,
    principal TEXT,
    operation TEXT NOT NULL,
    -- The format of this row. A version that does not know it must not run the operation again.
    format INTEGER NOT NULL,
    fingerprint_algorithm INTEGER NOT NULL CHECK (fingerprint_algorithm BETWEEN 0 AND 65535),
    fingerprint BLOB NOT NULL CHECK (length(fingerprint) = 32),
    -- The random token of the run that may change the row, or that settled it.
    owner BLOB NOT NULL CHECK (length(owner) = 16),
    -- 1 for the first run, larger for every further one.
    attempt INTEGER NOT NULL CHECK (attempt BETWEEN 1 AND 4294967295),
    -- 1 in progress, 2 completed, 3 failed permanently, 4 failed with an unknown outcome, 5 failed and retryable.
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 5),
    -- In progress: 1 fresh, 2 takeover, 3 retry, 4 probe.
    acquisition INTEGER CHECK (acquisition BETWEEN 1 AND 4),
    -- In progress: what happens after a crash. 1 rerun, 2 outcome unknown, 3 a probe has to find out.
    takeover INTEGER CHECK (takeover BETWEEN 1 AND 3),
    lease_until INTEGER,
    -- Failed and retryable: when the next attempt may begin.
    not_before INTEGER,
    checkpoint_name TEXT,
    -- The sequence of the checkpoint in 4 bytes, and its data.
    checkpoint_data BLOB,
    -- The answer. Header fields are length-prefixed names and values. A settled row without a body is a tombstone: its
    -- body was too large to keep.
    status INTEGER CHECK (status BETWEEN 0 AND 65535),
    headers BLOB,
    body BLOB,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    -- From this time on the row counts as absent and may be purged.
    expires_at INTEGER NOT NULL,
    CHECK ((state = 1) = (lease_until IS NOT NULL)),
    CHECK ((state = 1) = (acquisition IS NOT NULL)),
    CHECK ((state = 1) = (takeover IS NOT NULL)),
    CHECK ((state = 5) = (not_before IS NOT NULL)),
    CHECK ((state = 1) = (status IS NULL)),
    CHECK ((status IS NULL) = (headers IS NULL)),
    CHECK (body IS NULL OR status IS NOT NULL),
    CHECK ((checkpoint_name IS NULL) = (checkpoint_data IS NULL)),
    CHECK (lease_until IS NULL OR expires_at >= lease_until)
) STRICT;

-- What operators resolved, and why. Written before the record changes; the outcome is added after that.
CREATE TABLE main.idem_repairs (
    -- The owner of the record, if it was resolved.
    action BLOB NOT NULL PRIMARY KEY,
    record BLOB NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    resolution TEXT NOT NULL,
    outcome TEXT,
    at INTEGER NOT NULL
) STRICT;

-- For the purge.
CREATE INDEX main.idem_records_expires_at ON idem_records (expires_at);
