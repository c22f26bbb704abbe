-- Optional: spreads records over partitions by the time at which they came to be. What is over is then dropped a
-- partition at a time, which costs nothing however many records there are; removing rows one by one has to keep up with
-- the rate at which they are made.
--
-- It copies the records that are there, and nobody else can use the table meanwhile.
--
-- No index spans partitions, so none can tell that two rows in two of them have the same id. Whoever makes a record
-- takes a lock on its id first, and then sees every record that was made before; without it, two acquires of a new key
-- around the boundary between two partitions could both succeed.
LOCK TABLE "idem".idem_records IN ACCESS EXCLUSIVE MODE;

-- One row: how much time a partition covers, in microseconds. The replica that makes or drops partitions holds its lock:
-- unlike an advisory lock, only a role with a privilege on the table can take it.
CREATE TABLE "idem".idem_partitioning (
    one BOOLEAN NOT NULL PRIMARY KEY DEFAULT TRUE CHECK (one),
    period BIGINT NOT NULL CHECK (period >= 1000000)
);
INSERT INTO "idem".idem_partitioning (period) VALUES (86400000000);

CREATE TABLE "idem".idem_partitions (
    -- Records that came to be from here on, and before there, are in it.
    start_at BIGINT NOT NULL PRIMARY KEY,
    end_at BIGINT NOT NULL,
    name TEXT NOT NULL,
    -- When it is looked at again whether all its records are over.
    look_again BIGINT NOT NULL
);

-- The view is made anew for the new table, as it is.
SELECT set_config('idem.readable', pg_get_viewdef('"idem".idem_records_readable'::REGCLASS), TRUE);
DROP VIEW "idem".idem_records_readable;
ALTER TABLE "idem".idem_records RENAME TO idem_records_before;
ALTER INDEX "idem".idem_records_pkey RENAME TO idem_records_before_pkey;
ALTER INDEX "idem".idem_records_purge_after RENAME TO idem_records_before_purge_after;

CREATE TABLE "idem".idem_records (
    LIKE "idem".idem_records_before INCLUDING CONSTRAINTS INCLUDING COMMENTS, PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);
CREATE INDEX idem_records_purge_after ON "idem".idem_records (purge_after);

-- For records that no other partition takes, because nobody made it in time.
CREATE TABLE "idem".idem_records_rest PARTITION OF "idem".idem_records DEFAULT WITH (fillfactor = 25);

-- The lock of an id while a record is made. It is not the lock that a running transaction holds on the same id.
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

-- The three steps of looking after partitions, each in a transaction of its own: taking the locks of two of them
-- together, in another order than a statement that reads all partitions, could lock both out.

-- Makes the partitions of this period and the next two, and removes at most "most" records that are over from where they
-- have no partition of their own; says how many. Attaching one locks only those out who need idem_records_rest, for a
-- moment. Periods in which nobody made partitions get none: idem_records_rest has their records.
CREATE FUNCTION "idem".idem_make_partitions_v1(skew BIGINT, most INTEGER) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    length BIGINT;
    next_start BIGINT;
    removed INTEGER;
BEGIN
    SELECT period INTO length FROM "idem".idem_partitioning FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Another replica is at it.
        RETURN 0;
    END IF;
    SELECT greatest(max(end_at), at - at % length) INTO next_start FROM "idem".idem_partitions;
    WHILE next_start <= at + 2 * length LOOP
        BEGIN
            EXECUTE format(
                'CREATE TABLE "idem".%I (LIKE "idem".idem_records INCLUDING CONSTRAINTS) WITH (fillfactor = 25)',
                'idem_records_' || next_start
            );
            EXECUTE format(
                'ALTER TABLE "idem".idem_records ATTACH PARTITION "idem".%I FOR VALUES FROM (%s) TO (%s)',
                'idem_records_' || next_start, next_start, next_start + length
            );
            INSERT INTO "idem".idem_partitions (start_at, end_at, name, look_again)
            VALUES (next_start, next_start + length, 'idem_records_' || next_start, next_start + length);
        EXCEPTION WHEN check_violation THEN
            -- It comes too late: idem_records_rest has records of this period, and keeps the rest of them.
            INSERT INTO "idem".idem_partitions (start_at, end_at, name, look_again)
            VALUES (next_start, next_start + length, 'idem_records_rest', 9223372036854775807);
        END;
        next_start := next_start + length;
    END LOOP;
    DELETE FROM "idem".idem_partitions WHERE name = 'idem_records_rest' AND end_at < at;
    BEGIN
        DELETE FROM "idem".idem_records_rest WHERE id IN (
            SELECT id FROM "idem".idem_records_rest
            WHERE purge_after <= at AND expires_at <= at LIMIT most FOR UPDATE SKIP LOCKED
        );
        GET DIAGNOSTICS removed = ROW_COUNT;
        RETURN removed;
    EXCEPTION WHEN serialization_failure THEN
        -- A key that is over is used again, and its row has moved to another partition meanwhile. The next round goes on.
        RETURN 0;
    END;
END
$$;

-- The oldest partition in which every record has been over for a while; NULL when there is none. It reads a partition
-- whole, at the end of its period and at the end of the last record that was found living.
--
-- That while is a minute, or the period if that is shorter: far longer than a statement may take. One that was decided
-- when a record was about to be over, and extends it, has then ended.
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

-- Drops a partition in which every record was over a moment ago; answers whether it did.
--
-- A record that is over stays so, wherever it is: acquiring its key again moves it to the newest partition. The one
-- exception is a transaction that ran longer than records are kept, and has committed into the partition of the time when
-- it began: that is looked for once nobody can do it any more.
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

-- The records that were there before: the first partition takes them, and those of the current period.
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
