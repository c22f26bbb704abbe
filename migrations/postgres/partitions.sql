-- Optional: spreads records over partitions by the time at which they were made. Expired records are then dropped one
-- partition at a time, which costs the same for any number of records. A purge of single rows has to keep up with the rate
-- at which they are made.
--
-- It copies the existing records, and locks the table until that is done.
--
-- No index spans partitions, so two partitions could hold rows with the same id: two acquires of a new key around the
-- boundary of two partitions could both succeed. So an acquire locks the id first, and then sees every record that was made
-- before. A transaction that has run an operation locks the id before it commits.
LOCK TABLE "idem".idem_records IN ACCESS EXCLUSIVE MODE;

-- One row: how much time a partition covers, in microseconds. The replica that makes or drops partitions locks the row.
-- Only a role with a privilege on the table can do that, while every role can take an advisory lock.
CREATE TABLE "idem".idem_partitioning (
    one BOOLEAN NOT NULL PRIMARY KEY DEFAULT TRUE CHECK (one),
    period BIGINT NOT NULL CHECK (period >= 1000000)
);
INSERT INTO "idem".idem_partitioning (period) VALUES (86400000000);

CREATE TABLE "idem".idem_partitions (
    -- It holds the records that were made from start_at on, and before end_at.
    start_at BIGINT NOT NULL PRIMARY KEY,
    end_at BIGINT NOT NULL,
    name TEXT NOT NULL,
    -- When to check next whether all its records have expired.
    look_again BIGINT NOT NULL
);

-- The view is made again for the new table, with the same definition.
SELECT set_config('idem.readable', pg_get_viewdef('"idem".idem_records_readable'::REGCLASS), TRUE);
DROP VIEW "idem".idem_records_readable;
ALTER TABLE "idem".idem_records RENAME TO idem_records_before;
ALTER INDEX "idem".idem_records_pkey RENAME TO idem_records_before_pkey;
ALTER INDEX "idem".idem_records_purge_after RENAME TO idem_records_before_purge_after;

CREATE TABLE "idem".idem_records (
    LIKE "idem".idem_records_before INCLUDING COMMENTS, PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);
CREATE INDEX idem_records_purge_after ON "idem".idem_records (purge_after);

-- For records of a period whose partition was not made in time.
CREATE TABLE "idem".idem_records_rest PARTITION OF "idem".idem_records DEFAULT WITH (fillfactor = 25);

-- Locks ids while their records are made. A running transaction holds another lock on the same id.
CREATE OR REPLACE FUNCTION "idem".idem_exclude_v1(locks BIGINT[]) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lock BIGINT;
BEGIN
    FOR lock IN SELECT DISTINCT given.lock # 1 FROM unnest(locks) AS given (lock) ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(lock);
    END LOOP;
END
$$;

-- The upkeep of partitions has four steps, each in a separate transaction. One transaction that took the locks of two
-- steps could deadlock with a statement that reads all partitions.

-- Removes at most "most" expired records from idem_records_rest, and returns their number.
CREATE FUNCTION "idem".idem_purge_rest_v1(skew BIGINT, most INTEGER) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    removed INTEGER;
BEGIN
    DELETE FROM "idem".idem_records_rest WHERE id IN (
        SELECT id FROM "idem".idem_records_rest
        WHERE purge_after <= at AND expires_at <= at LIMIT most FOR UPDATE SKIP LOCKED
    );
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
EXCEPTION WHEN serialization_failure THEN
    -- An expired key was used again, and its row has moved to another partition. The next round continues.
    RETURN 0;
END
$$;

-- Makes the partitions of this period and the next two. Past periods without a partition get none: idem_records_rest has
-- their records. To attach a partition, the server reads all of idem_records_rest, which is locked meanwhile.
CREATE FUNCTION "idem".idem_make_partitions_v1(skew BIGINT) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    length BIGINT;
    next_start BIGINT;
BEGIN
    SELECT period INTO length FROM "idem".idem_partitioning FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Another replica does it.
        RETURN;
    END IF;
    SELECT greatest(max(end_at), at - at % length) INTO next_start FROM "idem".idem_partitions;
    WHILE next_start <= at + 2 * length LOOP
        BEGIN
            EXECUTE format(
                'CREATE TABLE "idem".%I (LIKE "idem".idem_records) WITH (fillfactor = 25)',
                'idem_records_' || next_start
            );
            EXECUTE format(
                'ALTER TABLE "idem".idem_records ATTACH PARTITION "idem".%I FOR VALUES FROM (%s) TO (%s)',
                'idem_records_' || next_start, next_start, next_start + length
            );
            INSERT INTO "idem".idem_partitions (start_at, end_at, name, look_again)
            VALUES (next_start, next_start + length, 'idem_records_' || next_start, next_start + length);
        EXCEPTION WHEN check_violation THEN
            -- Too late: idem_records_rest has records of this period, and takes the following ones too.
            INSERT INTO "idem".idem_partitions (start_at, end_at, name, look_again)
            VALUES (next_start, next_start + length, 'idem_records_rest', 9223372036854775807);
        END;
        next_start := next_start + length;
    END LOOP;
    DELETE FROM "idem".idem_partitions WHERE name = 'idem_records_rest' AND end_at < at;
END
$$;

-- The oldest partition in which every record expired at least a grace period ago. NULL if there is none. Reads a whole
-- partition: at the end of its period, and when the last record that it found has expired.
--
-- The grace period is a minute, or the partition's period if that is shorter. It is far longer than a statement may take:
-- a statement that extends a record just before its expiry has ended by then.
CREATE FUNCTION "idem".idem_past_partition_v1(skew BIGINT) RETURNS TEXT
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    partition RECORD;
    last_end BIGINT;
    grace BIGINT;
BEGIN
    SELECT least(period, 60000000) INTO grace FROM "idem".idem_partitioning;
    FOR partition IN
        SELECT * FROM "idem".idem_partitions WHERE end_at <= at AND look_again <= at ORDER BY start_at
    LOOP
        EXECUTE format('SELECT max(expires_at) FROM "idem".%I', partition.name) INTO last_end;
        IF coalesce(last_end, 0) <= at - grace THEN
            RETURN partition.name;
        END IF;
        UPDATE "idem".idem_partitions SET look_again = "idem".idem_later_v1(last_end, grace) WHERE start_at = partition.start_at;
    END LOOP;
    RETURN NULL;
END
$$;

-- Drops a partition that idem_past_partition_v1 has named. Returns whether it is dropped.
--
-- An expired record never becomes live in its place: to acquire its key again moves it to the newest partition. There is
-- one exception: a transaction that ran longer than records are kept commits into the partition of the time when it
-- began. So the check for live records is repeated under the lock.
CREATE FUNCTION "idem".idem_drop_partition_v1(skew BIGINT, past TEXT) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    last_end BIGINT;
BEGIN
    PERFORM FROM "idem".idem_partitioning FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN FALSE;
    END IF;
    LOCK TABLE "idem".idem_records IN ACCESS EXCLUSIVE MODE;
    IF NOT EXISTS (SELECT FROM "idem".idem_partitions WHERE name = past) THEN
        -- Another replica was faster.
        RETURN TRUE;
    END IF;
    EXECUTE format('SELECT max(purge_after) FROM "idem".%I', past) INTO last_end;
    IF last_end > at THEN
        UPDATE "idem".idem_partitions SET look_again = last_end WHERE name = past;
        RETURN FALSE;
    END IF;
    EXECUTE format('DROP TABLE "idem".%I', past);
    DELETE FROM "idem".idem_partitions WHERE name = past;
    RETURN TRUE;
END
$$;

-- The first partition takes the existing records, and those of the current period.
DO $$
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(0);
    until BIGINT;
BEGIN
    SELECT at - at % period + period INTO until FROM "idem".idem_partitioning;
    EXECUTE format(
        'CREATE TABLE "idem".idem_records_first PARTITION OF "idem".idem_records FOR VALUES FROM (MINVALUE) TO (%s)
        WITH (fillfactor = 25)', until
    );
    INSERT INTO "idem".idem_partitions (start_at, end_at, name, look_again) VALUES (0, until, 'idem_records_first', until);
END
$$;
INSERT INTO "idem".idem_records SELECT * FROM "idem".idem_records_before;
DROP TABLE "idem".idem_records_before;

DO $$
BEGIN
    EXECUTE 'CREATE VIEW "idem".idem_records_readable AS ' || current_setting('idem.readable');
END
$$;
