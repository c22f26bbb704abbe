-- Each statement may be repeated: MariaDB and MySQL commit every CREATE TABLE by itself, so that a migration which was cut off
-- goes on.

-- Distinguishes this database from every other one.
CREATE TABLE IF NOT EXISTS idem_identity (
    one TINYINT NOT NULL PRIMARY KEY,
    identity BINARY(16) NOT NULL,
    CHECK (one = 1)
) ENGINE = InnoDB;
INSERT INTO idem_identity (one, identity)
    SELECT 1, RANDOM_BYTES(16) FROM (SELECT 1) AS one_row WHERE NOT EXISTS (SELECT 1 FROM idem_identity);

-- Records of idempotent operations, one row each. Times are microseconds since 1970-01-01T00:00:00Z.
CREATE TABLE IF NOT EXISTS idem_records (
    id BINARY(32) NOT NULL PRIMARY KEY COMMENT 'SHA-256 or HMAC-SHA-256 over (namespace, scope, key)',
    namespace LONGTEXT NOT NULL COMMENT 'what the id was made from, for operators: no decision depends on it',
    principal LONGTEXT COMMENT 'a single-tenant scope has none, and an erased one is empty',
    operation LONGTEXT NOT NULL,
    format SMALLINT NOT NULL COMMENT 'a version that does not know it must not run the operation again',
    fingerprint_algorithm INT NOT NULL,
    fingerprint BINARY(32) NOT NULL,
    owner BINARY(16) NOT NULL COMMENT 'the random token of the run that may change the row, or that settled it',
    attempt BIGINT NOT NULL COMMENT '1 for the first run, larger for every further one',
    state TINYINT NOT NULL COMMENT '1 in progress, 2 completed, 3 failed, 4 failed with unknown outcome, 5 failed and retryable',
    acquisition TINYINT COMMENT 'in progress: 1 fresh, 2 takeover, 3 retry, 4 probe',
    takeover TINYINT COMMENT 'in progress: 1 rerun, 2 outcome unknown, 3 a probe has to find out',
    lease_until BIGINT COMMENT 'in progress',
    not_before BIGINT COMMENT 'failed and retryable: when the next attempt may begin',
    checkpoint_name LONGTEXT,
    checkpoint_data LONGBLOB COMMENT 'the sequence in 4 bytes, and the data',
    status INT COMMENT 'once it ended',
    headers LONGBLOB COMMENT 'length-prefixed names and values',
    `body` LONGBLOB COMMENT 'a settled row without a body is a tombstone: its body was too large to keep, or was erased',
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL COMMENT 'from this time on the row counts as absent and may be purged',
    CHECK (fingerprint_algorithm BETWEEN 0 AND 65535),
    CHECK (attempt BETWEEN 1 AND 4294967295),
    CHECK (state BETWEEN 1 AND 5),
    CHECK (acquisition BETWEEN 1 AND 4),
    CHECK (takeover BETWEEN 1 AND 3),
    CHECK (status BETWEEN 0 AND 65535),
    CHECK ((state = 1) = (lease_until IS NOT NULL)),
    CHECK ((state = 1) = (acquisition IS NOT NULL)),
    CHECK ((state = 1) = (takeover IS NOT NULL)),
    CHECK ((state = 5) = (not_before IS NOT NULL)),
    CHECK ((state = 1) = (status IS NULL)),
    CHECK ((status IS NULL) = (headers IS NULL)),
    CHECK (`body` IS NULL OR status IS NOT NULL),
    CHECK ((checkpoint_name IS NULL) = (checkpoint_data IS NULL)),
    CHECK (lease_until IS NULL OR expires_at >= lease_until),
    -- For the purge.
    KEY idem_records_expires_at (expires_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What operators resolved or erased, and why. Written before the record changes; the outcome is added after that.
CREATE TABLE IF NOT EXISTS idem_repairs (
    number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    action BINARY(16) NOT NULL COMMENT 'the owner of the record, if it was resolved or erased',
    record BINARY(32) NOT NULL,
    actor LONGTEXT NOT NULL,
    reason LONGTEXT NOT NULL,
    resolution LONGTEXT NOT NULL,
    outcome LONGTEXT,
    at BIGINT NOT NULL,
    UNIQUE KEY idem_repairs_action (action),
    -- For the erasure of a principal.
    KEY idem_repairs_record (record)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
