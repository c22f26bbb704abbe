-- The verbs of the store, as functions. A later version adds functions with a new suffix, and processes of both
-- versions work side by side.
--
-- Order: each function takes many items in arrays and works them in the order of their ids. A statement that calls
-- several functions on existing rows locks all those rows first. So two processes never deadlock.
--
-- Decisions: the state machine of idem-core decides. Where it needs more than one look (an expired record, a repeated
-- settlement), it reads the row and applies its decision with idem_replace_v1 or idem_remove_v1, if the row has not
-- changed.
--
-- Search path: another role may be able to create objects in a schema on the session's path. Each PL/pgSQL function
-- therefore sets a path of pg_catalog alone. The small SQL functions set none, because the planner would not inline
-- them. Their names are qualified.
--
-- Time: "skew" is added to the server's clock. It is 0 outside of tests.
--
-- Locks: a lock is 64 bits of a record id. The transaction that runs an operation holds it exclusively; a statement that
-- makes a record holds it shared. The transaction also holds a second lock exclusively, lock # 2. Lookups try that one:
-- if they held the first for a moment, a beginning transaction would take them for another run.
--
-- Plans: planning takes longer than the call, so plans are kept. A plan made for a nearly empty table must not read a
-- full one, so the index is the only way to a record: OFFSET 0 keeps a subquery from being merged into its query, and no
-- plan can merge or hash by ANY (ARRAY[wanted.id]). The purge is left to the planner, because what it finds depends on
-- the content of the table.

-- A time "by" microseconds later, at most the largest one. NULL if "by" is NULL.
CREATE FUNCTION "idem".idem_later_v1(at BIGINT, by BIGINT) RETURNS BIGINT
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN by OPERATOR(pg_catalog.>) (9223372036854775807 OPERATOR(pg_catalog.-) at) THEN 9223372036854775807
    ELSE at OPERATOR(pg_catalog.+) by
END;

CREATE FUNCTION "idem".idem_now_v1(skew BIGINT) RETURNS BIGINT
LANGUAGE sql VOLATILE
RETURN (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::BIGINT
    OPERATOR(pg_catalog.+) skew;

-- Keeps other transactions from making records with these ids until this one ends. Needed only with partitions, where
-- no index spans them. In a single table its primary key does that, and this does nothing.
CREATE FUNCTION "idem".idem_exclude_v1(locks BIGINT[]) RETURNS VOID
LANGUAGE sql VOLATILE
RETURN NULL::pg_catalog.void;

-- Makes the records that do not exist, and reads those that do.
--
-- seen: 1 made; 2 exists; 3 does not exist, because a transaction runs the operation; 4 another session made it during
-- this statement: ask again.
CREATE FUNCTION "idem".idem_acquire_v1(
    skew BIGINT, ids BYTEA[], locks BIGINT[], namespaces BYTEA[], principals BYTEA[], operations BYTEA[],
    formats BIGINT[], fingerprint_algorithms BIGINT[], fingerprints BYTEA[], owners BYTEA[], takeovers BIGINT[],
    leases BIGINT[], retentions BIGINT[]
) RETURNS TABLE (
    item BIGINT, seen INTEGER, now BIGINT, version BIGINT,
    format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA, owner BYTEA, attempt BIGINT, state SMALLINT,
    acquisition SMALLINT, takeover SMALLINT, lease_until BIGINT, not_before BIGINT, checkpoint_name BYTEA,
    checkpoint_data BYTEA, status INTEGER, headers BYTEA, body BYTEA, created_at BIGINT, updated_at BIGINT,
    expires_at BIGINT
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    at BIGINT;
BEGIN
    -- First, so that a migration to partitions that is under way ends before idem_exclude_v1 is called.
    LOCK TABLE "idem".idem_records IN ROW EXCLUSIVE MODE;
    PERFORM "idem".idem_exclude_v1(locks);
    at := "idem".idem_now_v1(skew);
    RETURN QUERY WITH wanted AS MATERIALIZED (
        SELECT
            item.*, known.id IS NOT NULL AS is_there, known.version, known.format AS known_format,
            known.fingerprint_algorithm AS known_algorithm, known.fingerprint AS known_fingerprint,
            known.owner AS known_owner, known.attempt, known.state, known.acquisition, known.takeover AS known_takeover,
            known.lease_until, known.not_before, known.checkpoint_name, known.checkpoint_data, known.status,
            known.headers, known.body, known.created_at, known.updated_at, known.expires_at,
            -- A transaction that made the record may have released the lock after this statement took its snapshot.
            -- Then the insert meets that record and does nothing.
            CASE WHEN known.id IS NULL THEN pg_try_advisory_xact_lock_shared(item.lock) END AS is_free
        FROM (
            SELECT * FROM unnest(
                ids, locks, namespaces, principals, operations, formats, fingerprint_algorithms, fingerprints, owners,
                takeovers, leases, retentions
            ) WITH ORDINALITY AS given (
                id, lock, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, takeover,
                lease, retention, number
            )
            ORDER BY given.id
        ) AS item
        LEFT JOIN LATERAL (
            SELECT one.xmin AS version, one.* FROM "idem".idem_records AS one WHERE one.id = item.id OFFSET 0
        ) AS known ON TRUE
    ),
    made AS (
        INSERT INTO "idem".idem_records (
            id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state,
            acquisition, takeover, lease_until, created_at, updated_at, expires_at, purge_after
        )
        SELECT
            wanted.id, convert_from(wanted.namespace, 'UTF8'), convert_from(wanted.principal, 'UTF8'),
            convert_from(wanted.operation, 'UTF8'), wanted.format, wanted.fingerprint_algorithm, wanted.fingerprint,
            wanted.owner, 1, 1, 1, wanted.takeover, "idem".idem_later_v1(at, wanted.lease), at, at,
            "idem".idem_later_v1("idem".idem_later_v1(at, wanted.lease), wanted.retention),
            "idem".idem_later_v1(at, wanted.retention)
        FROM wanted
        WHERE wanted.is_free
        ON CONFLICT DO NOTHING
        RETURNING id || owner AS identity
    )
    SELECT
        wanted.number,
        CASE
            WHEN wanted.is_there THEN 2
            WHEN NOT wanted.is_free THEN 3
            WHEN wanted.id || wanted.owner = ANY (ARRAY(SELECT made.identity FROM made)) THEN 1
            ELSE 4
        END,
        at, wanted.version::TEXT::BIGINT, wanted.known_format, wanted.known_algorithm, wanted.known_fingerprint,
        wanted.known_owner, wanted.attempt, wanted.state, wanted.acquisition, wanted.known_takeover, wanted.lease_until,
        wanted.not_before, wanted.checkpoint_name, wanted.checkpoint_data, wanted.status, wanted.headers, wanted.body,
        wanted.created_at, wanted.updated_at, wanted.expires_at
    FROM wanted;
END
$$;

-- Reads records. If a lock is given, seen is 3 while a transaction runs the operation. Without such a transaction it is 2
-- if there is a record, else 4.
CREATE FUNCTION "idem".idem_lookup_v1(skew BIGINT, ids BYTEA[], locks BIGINT[]) RETURNS TABLE (
    item BIGINT, seen INTEGER, now BIGINT, version BIGINT,
    format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA, owner BYTEA, attempt BIGINT, state SMALLINT,
    acquisition SMALLINT, takeover SMALLINT, lease_until BIGINT, not_before BIGINT, checkpoint_name BYTEA,
    checkpoint_data BYTEA, status INTEGER, headers BYTEA, body BYTEA, created_at BIGINT, updated_at BIGINT,
    expires_at BIGINT
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    free BOOLEAN[];
    at BIGINT;
BEGIN
    -- A separate statement before the rows are read: if the lock is free, a transaction that ran the operation has
    -- committed, and the next statement sees its record.
    --
    -- The lock is released at once, because a beginning transaction waits for it.
    SELECT array_agg(
        CASE
            WHEN lock IS NULL THEN TRUE
            WHEN pg_catalog.pg_try_advisory_lock_shared(lock OPERATOR(pg_catalog.#) 2::BIGINT)
            THEN pg_catalog.pg_advisory_unlock_shared(lock OPERATOR(pg_catalog.#) 2::BIGINT)
            ELSE FALSE
        END
        ORDER BY number
    ) INTO free
    FROM unnest(locks) WITH ORDINALITY AS wanted (lock, number);
    at := "idem".idem_now_v1(skew);
    RETURN QUERY SELECT
        wanted.number,
        CASE
            WHEN NOT wanted.free THEN 3
            WHEN known.id IS NOT NULL THEN 2
            ELSE 4
        END,
        at, known.version::TEXT::BIGINT,
        known.format, known.fingerprint_algorithm, known.fingerprint, known.owner, known.attempt, known.state,
        known.acquisition, known.takeover, known.lease_until, known.not_before, known.checkpoint_name,
        known.checkpoint_data, known.status, known.headers, known.body, known.created_at, known.updated_at,
        known.expires_at
    FROM unnest(ids, free) WITH ORDINALITY AS wanted (id, free, number)
    LEFT JOIN LATERAL (
        SELECT one.xmin AS version, one.* FROM "idem".idem_records AS one WHERE one.id = wanted.id OFFSET 0
    ) AS known ON TRUE;
END
$$;

-- Locks rows in the order of their ids, for a statement that calls several functions.
CREATE FUNCTION "idem".idem_lock_v1(ids BYTEA[]) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
BEGIN
    PERFORM FROM "idem".idem_records AS known WHERE known.id = ANY (ids) ORDER BY known.id FOR UPDATE;
END
$$;

-- Extends leases. Returns the items that it applied to.
CREATE FUNCTION "idem".idem_renew_v1(
    skew BIGINT, ids BYTEA[], owners BYTEA[], leases BIGINT[], retentions BIGINT[]
) RETURNS TABLE (item BIGINT)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
BEGIN
    RETURN QUERY UPDATE "idem".idem_records AS known SET
        lease_until = "idem".idem_later_v1(at, wanted.lease),
        updated_at = at,
        expires_at = "idem".idem_later_v1("idem".idem_later_v1(at, wanted.lease), wanted.retention),
        purge_after = least(
            known.purge_after,
            "idem".idem_later_v1("idem".idem_later_v1(at, wanted.lease), wanted.retention)
        )
    FROM (
        SELECT * FROM unnest(ids, owners, leases, retentions) WITH ORDINALITY
            AS given (id, owner, lease, retention, number)
        ORDER BY given.id
    ) AS wanted
    WHERE known.id = ANY (ARRAY[wanted.id])
        AND known.owner = wanted.owner AND known.state = 1 AND at < known.expires_at
    RETURNING wanted.number;
END
$$;

-- Stores checkpoints. Returns the items that it applied to. The first four bytes of the data are the sequence. A
-- checkpoint applies if its sequence is larger than the stored one, or if both are the same checkpoint.
CREATE FUNCTION "idem".idem_checkpoint_v1(
    skew BIGINT, ids BYTEA[], owners BYTEA[], names BYTEA[], datas BYTEA[]
) RETURNS TABLE (item BIGINT)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
BEGIN
    RETURN QUERY UPDATE "idem".idem_records AS known SET
        checkpoint_name = wanted.name,
        checkpoint_data = wanted.data,
        updated_at = CASE WHEN known.checkpoint_data = wanted.data THEN known.updated_at ELSE at END
    FROM (
        SELECT * FROM unnest(ids, owners, names, datas) WITH ORDINALITY AS given (id, owner, name, data, number)
        ORDER BY given.id
    ) AS wanted
    WHERE known.id = ANY (ARRAY[wanted.id])
        AND known.owner = wanted.owner AND known.state = 1 AND at < known.expires_at
        AND (
            known.checkpoint_data IS NULL
            OR substring(known.checkpoint_data, 1, 4) < substring(wanted.data, 1, 4)
            OR known.checkpoint_data = wanted.data AND known.checkpoint_name = wanted.name
        )
    RETURNING wanted.number;
END
$$;

-- Settles runs. Returns the items that it applied to. "waits" says after how many microseconds a retryable failure may run
-- again, and is NULL for every other end.
CREATE FUNCTION "idem".idem_settle_v1(
    skew BIGINT, ids BYTEA[], owners BYTEA[], states BIGINT[], waits BIGINT[], statuses BIGINT[], headers BYTEA[],
    bodies BYTEA[], retentions BIGINT[]
) RETURNS TABLE (item BIGINT)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
BEGIN
    RETURN QUERY UPDATE "idem".idem_records AS known SET
        state = wanted.state,
        acquisition = NULL,
        takeover = NULL,
        lease_until = NULL,
        not_before = "idem".idem_later_v1(at, wanted.wait),
        -- After a failure, the next attempt or an operator needs the checkpoint.
        checkpoint_name = CASE WHEN wanted.state <> 2 THEN known.checkpoint_name END,
        checkpoint_data = CASE WHEN wanted.state <> 2 THEN known.checkpoint_data END,
        status = wanted.status,
        headers = wanted.headers,
        body = wanted.body,
        updated_at = at,
        expires_at = "idem".idem_later_v1("idem".idem_later_v1(at, coalesce(wanted.wait, 0)), wanted.retention),
        purge_after = least(
            known.purge_after,
            "idem".idem_later_v1("idem".idem_later_v1(at, coalesce(wanted.wait, 0)), wanted.retention)
        )
    FROM (
        SELECT * FROM unnest(ids, owners, states, waits, statuses, headers, bodies, retentions) WITH ORDINALITY
            AS given (id, owner, state, wait, status, headers, body, retention, number)
        ORDER BY given.id
    ) AS wanted
    WHERE known.id = ANY (ARRAY[wanted.id])
        AND known.owner = wanted.owner AND known.state = 1 AND at < known.expires_at
    RETURNING wanted.number;
END
$$;

-- Removes the records of first runs that are released. Returns the items that it applied to. A record of a later attempt
-- that may have had effects before is not removed: the state machine decides on it.
CREATE FUNCTION "idem".idem_release_v1(skew BIGINT, ids BYTEA[], owners BYTEA[]) RETURNS TABLE (item BIGINT)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
BEGIN
    RETURN QUERY DELETE FROM "idem".idem_records AS known
    USING (
        SELECT * FROM unnest(ids, owners) WITH ORDINALITY AS given (id, owner, number) ORDER BY given.id
    ) AS wanted
    WHERE known.id = ANY (ARRAY[wanted.id])
        AND known.owner = wanted.owner AND known.state = 1 AND at < known.expires_at
        AND CASE known.takeover
            WHEN 1 THEN known.attempt = 1 AND known.checkpoint_name IS NULL
            ELSE known.acquisition NOT IN (3, 4)
        END
    RETURNING wanted.number;
END
$$;

-- Replaces a row by the decision of the state machine, if the row has not changed since the decision. Returns 1: done;
-- 2: the row has changed; 3: a transaction runs the operation (only if a lock is given).
--
-- A row that has expired since the decision counts as changed, unless the decision is to begin it anew. Its partition may
-- be about to be dropped. The process may have been stopped for long after its decision.
CREATE FUNCTION "idem".idem_replace_v1(
    skew BIGINT, id BYTEA, lock BIGINT, version BIGINT, format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA,
    owner BYTEA, attempt BIGINT, state SMALLINT, acquisition SMALLINT, takeover SMALLINT, lease_until BIGINT,
    not_before BIGINT, checkpoint_name BYTEA, checkpoint_data BYTEA, status INTEGER, headers BYTEA, body BYTEA,
    created_at BIGINT, updated_at BIGINT, expires_at BIGINT, purge_after BIGINT
) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    IF lock IS NOT NULL AND NOT pg_try_advisory_xact_lock_shared(lock) THEN
        RETURN 3;
    END IF;
    UPDATE "idem".idem_records AS known SET
        format = idem_replace_v1.format,
        fingerprint_algorithm = idem_replace_v1.fingerprint_algorithm,
        fingerprint = idem_replace_v1.fingerprint,
        owner = idem_replace_v1.owner,
        attempt = idem_replace_v1.attempt,
        state = idem_replace_v1.state,
        acquisition = idem_replace_v1.acquisition,
        takeover = idem_replace_v1.takeover,
        lease_until = idem_replace_v1.lease_until,
        not_before = idem_replace_v1.not_before,
        checkpoint_name = idem_replace_v1.checkpoint_name,
        checkpoint_data = idem_replace_v1.checkpoint_data,
        status = idem_replace_v1.status,
        headers = idem_replace_v1.headers,
        body = idem_replace_v1.body,
        created_at = idem_replace_v1.created_at,
        updated_at = idem_replace_v1.updated_at,
        expires_at = idem_replace_v1.expires_at,
        purge_after = CASE
            WHEN known.created_at = idem_replace_v1.created_at
            THEN least(known.purge_after, idem_replace_v1.purge_after)
            ELSE idem_replace_v1.purge_after
        END
    WHERE known.id = idem_replace_v1.id AND known.xmin::TEXT::BIGINT = version
        AND (known.created_at <> idem_replace_v1.created_at OR "idem".idem_now_v1(skew) < known.expires_at);
    RETURN CASE WHEN FOUND THEN 1 ELSE 2 END;
EXCEPTION WHEN serialization_failure THEN
    -- The row has moved to another partition.
    RETURN 2;
END
$$;

-- Removes a row, if it has not changed since the state machine decided so. Returns 1: done; 2: the row has changed.
CREATE FUNCTION "idem".idem_remove_v1(id BYTEA, version BIGINT) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    DELETE FROM "idem".idem_records AS known
    WHERE known.id = idem_remove_v1.id AND known.xmin::TEXT::BIGINT = idem_remove_v1.version;
    RETURN CASE WHEN FOUND THEN 1 ELSE 2 END;
EXCEPTION WHEN serialization_failure THEN
    -- The row has moved to another partition.
    RETURN 2;
END
$$;

-- Drops the prepared statements that sqlx has left in a session behind a transaction-pooling proxy. sqlx numbers its
-- statements from 1 on each connection to the proxy, so the names of two clients collide in a shared session.
CREATE FUNCTION "idem".idem_unprepare_v1() RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    statement TEXT;
BEGIN
    FOR statement IN SELECT name FROM pg_prepared_statements WHERE name LIKE 'sqlx\_s\_%' AND NOT from_sql LOOP
        EXECUTE format('DEALLOCATE %I', statement);
    END LOOP;
END
$$;

-- The time of the client's message. Unlike the clock, it is the same in all parts of a statement, and costs no subquery.
CREATE FUNCTION "idem".idem_at_v1(skew BIGINT) RETURNS BIGINT
LANGUAGE sql STABLE
RETURN (extract(epoch FROM pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000000)::BIGINT
    OPERATOR(pg_catalog.+) skew;

-- Raises IDM02 unless the setting idem.mark has the value that it had before the store's savepoint. If it has another one,
-- ROLLBACK TO went to a savepoint of the handler that has the same name.
CREATE FUNCTION "idem".idem_expect_v1(mark TEXT) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF current_setting('idem.mark', TRUE) IS DISTINCT FROM mark THEN
        RAISE 'the handler has made a savepoint with the name of the store''s savepoint' USING ERRCODE = 'IDM02';
    END IF;
END
$$;

-- Removes an expired record, before its successor is inserted, in the transaction in which its operation ran and which holds its
-- lock. A purge or a dropped partition may have removed it since. Waits at most "patience" milliseconds for each lock, and keeps
-- the lock_timeout that the handler has set.
--
-- Raises IDM01 if it is another version.
CREATE FUNCTION "idem".idem_forget_v1(patience BIGINT, lock BIGINT, id BYTEA, version BIGINT) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = 0
AS $$
#variable_conflict use_variable
DECLARE
    waiting CONSTANT TEXT := set_config('lock_timeout', patience::TEXT, TRUE);
BEGIN
    -- As in idem_acquire_v1. Another session that looks for this record then waits until this transaction has ended.
    LOCK TABLE "idem".idem_records IN ROW EXCLUSIVE MODE;
    PERFORM "idem".idem_exclude_v1(ARRAY[lock]);
    DELETE FROM "idem".idem_records AS known
    WHERE known.id = idem_forget_v1.id AND known.xmin::TEXT::BIGINT = version;
    IF NOT FOUND AND EXISTS (SELECT FROM "idem".idem_records AS known WHERE known.id = idem_forget_v1.id) THEN
        RAISE 'another run has changed the record' USING ERRCODE = 'IDM01';
    END IF;
END
$$;

-- Settles the record of an earlier attempt, in the transaction in which its operation ran again and which holds its lock. Waits
-- like idem_forget_v1.
--
-- Raises IDM01 if it is another version.
CREATE FUNCTION "idem".idem_put_v1(
    id BYTEA, version BIGINT, principal BYTEA, format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA,
    owner BYTEA, attempt BIGINT, state SMALLINT, wait BIGINT, checkpoint_name BYTEA, checkpoint_data BYTEA,
    status INTEGER, headers BYTEA, body BYTEA, created_at BIGINT, skew BIGINT, retention BIGINT, lock BIGINT, patience BIGINT
) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = 0
AS $$
#variable_conflict use_variable
DECLARE
    waiting CONSTANT TEXT := set_config('lock_timeout', patience::TEXT, TRUE);
    at CONSTANT BIGINT := "idem".idem_at_v1(skew);
    not_before CONSTANT BIGINT := at + wait;
    expires_at CONSTANT BIGINT := coalesce(not_before, at) + retention;
BEGIN
    -- As in idem_forget_v1.
    LOCK TABLE "idem".idem_records IN ROW EXCLUSIVE MODE;
    PERFORM "idem".idem_exclude_v1(ARRAY[lock]);
    UPDATE "idem".idem_records AS known SET
        principal = pg_catalog.convert_from(idem_put_v1.principal, 'UTF8'),
        format = idem_put_v1.format,
        fingerprint_algorithm = idem_put_v1.fingerprint_algorithm,
        fingerprint = idem_put_v1.fingerprint,
        owner = idem_put_v1.owner,
        attempt = idem_put_v1.attempt,
        state = idem_put_v1.state,
        acquisition = NULL,
        takeover = NULL,
        lease_until = NULL,
        not_before = not_before,
        checkpoint_name = idem_put_v1.checkpoint_name,
        checkpoint_data = idem_put_v1.checkpoint_data,
        status = idem_put_v1.status,
        headers = idem_put_v1.headers,
        body = idem_put_v1.body,
        created_at = idem_put_v1.created_at,
        updated_at = at,
        expires_at = expires_at,
        purge_after = expires_at
    WHERE known.id = idem_put_v1.id AND known.xmin::TEXT::BIGINT = version;
    IF NOT FOUND THEN
        RAISE 'another run has changed the record' USING ERRCODE = 'IDM01';
    END IF;
END
$$;

-- Whether this owner runs the operation now: for the business writes of an operation that runs outside of the store's
-- transactions. Locks the record until the caller's transaction ends, so that no other run can begin between this check
-- and the caller's write.
CREATE FUNCTION "idem".idem_owns_v1(skew BIGINT, lock BIGINT, record BYTEA, token BYTEA) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(lock) THEN
        RETURN FALSE;
    END IF;
    PERFORM FROM "idem".idem_records AS known
    WHERE known.id = record AND known.owner = token AND known.state = 1
        AND "idem".idem_now_v1(skew) < known.expires_at
    FOR SHARE;
    IF NOT FOUND THEN
        RETURN FALSE;
    END IF;
    -- The transaction holds the record now. A client that has vanished must not keep it for ever.
    IF current_setting('idle_in_transaction_session_timeout') = '0' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '10s', TRUE);
    END IF;
    RETURN TRUE;
END
$$;

-- Removes at most "most" expired records and returns their number. Skips rows that are locked.
--
-- A settled row may expire later than its purge_after says. When there is nothing more to remove, this corrects the
-- purge_after of such rows, so that the next purges skip them. A difference of up to a minute is not worth a write. A row
-- that may run again is not touched: a transaction that runs it would find it changed.
CREATE FUNCTION "idem".idem_purge_v1(skew BIGINT, most INTEGER) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_indexscan = on SET enable_nestloop = on
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
AS $$
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    rounds CONSTANT INTEGER := 16;
    removed INTEGER;
BEGIN
    FOR round IN 1..rounds LOOP
        BEGIN
            WITH over AS (
                SELECT known.id, known.created_at FROM "idem".idem_records AS known
                WHERE known.purge_after <= at AND known.expires_at <= at
                ORDER BY known.purge_after
                LIMIT most
                FOR UPDATE SKIP LOCKED
            )
            DELETE FROM "idem".idem_records AS known USING over
            WHERE known.id = over.id AND known.created_at = over.created_at;
            GET DIAGNOSTICS removed = ROW_COUNT;
            IF removed < most THEN
                WITH later AS (
                    SELECT known.id, known.created_at FROM "idem".idem_records AS known
                    WHERE known.purge_after <= at AND known.expires_at > at + 60000000 AND known.state IN (2, 3, 4)
                    ORDER BY known.purge_after
                    LIMIT most
                    FOR UPDATE SKIP LOCKED
                )
                UPDATE "idem".idem_records AS known SET purge_after = known.expires_at FROM later
                WHERE known.id = later.id AND known.created_at = later.created_at;
            END IF;
            RETURN removed;
        EXCEPTION WHEN serialization_failure THEN
            -- An expired key was used again, and its row has moved to another partition.
            IF round = rounds THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$$;

-- For operators: how many blocks hold about "most" rows, and how many blocks the largest table of records has.
CREATE FUNCTION "idem".idem_blocks_v1(most BIGINT) RETURNS TABLE (blocks BIGINT, total BIGINT)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    records CONSTANT OID := '"idem".idem_records'::REGCLASS;
BEGIN
    -- Before the first ANALYZE a block is taken to have 8 rows.
    RETURN QUERY SELECT
        greatest(1, floor(
            most / greatest(coalesce(sum(known.reltuples / known.relpages) FILTER (WHERE known.relpages > 0), 8), 1)
        ))::BIGINT,
        coalesce(max(pg_relation_size(known.oid)), 0) / current_setting('block_size')::BIGINT
    FROM pg_class AS known
    WHERE known.oid = records OR known.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = records);
END
$$;

-- The state of a record to show: a released one is not in progress any more.
CREATE FUNCTION "idem".idem_shown_v1(state SMALLINT, acquisition SMALLINT, owner BYTEA) RETURNS INTEGER
LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN state = 1 AND acquisition <> 4 AND owner = decode(repeat('00', 16), 'hex') THEN 5
    ELSE state
END;

-- For operators: those rows of a part that are selected, each with the time, the number of rows in the part, the place of its
-- last row, the number of blocks that were read and that of all blocks. If none is selected, there is one row without a record.
--
-- A part has the rows of so many blocks, at most "most" of them, in the order in which they lie in the table: reading them so is
-- many times faster than by their ids. It begins behind a place: a line of a block, and, if there are partitions, the table. All
-- rows of a part are looked at, so only what is needed to select them is read there. What may be large is left out: of the headers
-- only the trace is there, which has a mark of 4 bytes and 25 of its own.
CREATE FUNCTION "idem".idem_list_v1(
    skew BIGINT, block BIGINT, line INTEGER, relation OID, most BIGINT, states INTEGER[], age BIGINT, abandoned BOOLEAN,
    namespace BYTEA, principal BYTEA, operation BYTEA, trace BYTEA
) RETURNS TABLE (
    now BIGINT, scanned BIGINT, last_place TEXT, last_relation BIGINT, span BIGINT, total BIGINT,
    id BYTEA, of_namespace TEXT, of_principal TEXT, of_operation TEXT, body_bytes BIGINT, shown INTEGER, version BIGINT,
    format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA, owner BYTEA, attempt BIGINT, state SMALLINT,
    acquisition SMALLINT, takeover SMALLINT, lease_until BIGINT, not_before BIGINT, checkpoint_name BYTEA,
    checkpoint_data BYTEA, status INTEGER, headers BYTEA, body BYTEA, created_at BIGINT, updated_at BIGINT,
    expires_at BIGINT
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    in_namespace CONSTANT TEXT := convert_from(idem_list_v1.namespace, 'UTF8');
    of_one_principal CONSTANT TEXT := convert_from(idem_list_v1.principal, 'UTF8');
    of_one_operation CONSTANT TEXT := convert_from(idem_list_v1.operation, 'UTF8');
    trace_mark CONSTANT BYTEA := decode('ffffffff', 'hex');
    of_one_trace CONSTANT BYTEA := trace_mark || trace;
    begin_at CONSTANT TID := format('(%s,%s)', block, line);
    read_blocks BIGINT;
    all_blocks BIGINT;
    end_at TID;
BEGIN
    SELECT known.blocks, known.total INTO read_blocks, all_blocks FROM "idem".idem_blocks_v1(most) AS known;
    end_at := format('(%s,0)', least(block + read_blocks, 4294967295));
    RETURN QUERY WITH part AS MATERIALIZED (
        SELECT
            known.ctid AS place, known.tableoid AS of_relation,
            known.expires_at > at
                AND (states IS NULL OR "idem".idem_shown_v1(known.state, known.acquisition, known.owner) = ANY (states))
                AND (age IS NULL OR known.created_at <= at - age)
                AND (
                    NOT abandoned
                    OR "idem".idem_shown_v1(known.state, known.acquisition, known.owner) = 1 AND known.lease_until <= at
                )
                AND (in_namespace IS NULL OR known.namespace = in_namespace)
                AND (of_one_principal IS NULL OR known.principal = of_one_principal)
                AND (of_one_operation IS NULL OR known.operation = of_one_operation)
                AND (of_one_trace IS NULL OR substring(known.headers, 1, 20) = of_one_trace)
                AS is_selected
        FROM "idem".idem_records AS known
        WHERE known.ctid >= begin_at AND known.ctid < end_at AND (known.ctid > begin_at OR known.tableoid > relation)
        ORDER BY known.ctid, known.tableoid
        LIMIT most
    ),
    last AS (SELECT part.place, part.of_relation FROM part ORDER BY part.place DESC, part.of_relation DESC LIMIT 1),
    whole AS (
        SELECT count(*) AS rows, (SELECT last.place::TEXT FROM last), (SELECT last.of_relation::BIGINT FROM last), read_blocks,
            all_blocks
        FROM part
    ),
    selected AS (
        SELECT
            known.id, known.namespace, known.principal, known.operation, octet_length(known.body)::BIGINT AS body_bytes,
            "idem".idem_shown_v1(known.state, known.acquisition, known.owner) AS shown, known.xmin::TEXT::BIGINT AS version,
            known.format, known.fingerprint_algorithm, known.fingerprint, known.owner, known.attempt, known.state,
            known.acquisition, known.takeover, known.lease_until, known.not_before, known.checkpoint_name,
            substring(known.checkpoint_data, 1, 4) AS checkpoint_data, known.status,
            CASE
                WHEN known.status IS NULL THEN NULL
                WHEN substring(known.headers, 1, 4) = trace_mark THEN substring(known.headers, 1, 29)
                ELSE ''::BYTEA
            END AS headers,
            NULL::BYTEA AS body, known.created_at, known.updated_at, known.expires_at
        FROM "idem".idem_records AS known
        JOIN part ON part.is_selected AND part.place = known.ctid AND part.of_relation = known.tableoid
        -- Partitions have rows at the same places.
        WHERE known.ctid = ANY (ARRAY(SELECT part.place FROM part WHERE part.is_selected))
        ORDER BY part.place, part.of_relation
    )
    SELECT at, whole.*, selected.*
    FROM whole LEFT JOIN selected ON TRUE;
END
$$;

-- For operators: the number of rows of a part by their state, behind the same columns as in idem_list_v1. Rows of another format
-- than "known_format" are not readable.
CREATE FUNCTION "idem".idem_count_v1(
    skew BIGINT, block BIGINT, line INTEGER, relation OID, most BIGINT, known_format INTEGER
) RETURNS TABLE (
    now BIGINT, scanned BIGINT, last_place TEXT, last_relation BIGINT, span BIGINT, total BIGINT, unreadable BIGINT,
    in_progress BIGINT, abandoned BIGINT, completed BIGINT, failed BIGINT, outcome_unknown BIGINT, retryable BIGINT,
    expired BIGINT, body_bytes BIGINT, oldest_in_progress BIGINT, oldest_expired BIGINT, made_last_hour BIGINT,
    unsuccessful_last_hour BIGINT
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    an_hour_ago CONSTANT BIGINT := at - 3600000000;
    begin_at CONSTANT TID := format('(%s,%s)', block, line);
    read_blocks BIGINT;
    all_blocks BIGINT;
    end_at TID;
BEGIN
    SELECT known.blocks, known.total INTO read_blocks, all_blocks FROM "idem".idem_blocks_v1(most) AS known;
    end_at := format('(%s,0)', least(block + read_blocks, 4294967295));
    RETURN QUERY WITH part AS MATERIALIZED (
        SELECT
            known.ctid AS place, known.tableoid AS of_relation, octet_length(known.body) AS body_bytes, known.created_at,
            known.expires_at,
            CASE
                WHEN known.format <> known_format THEN -1
                WHEN known.expires_at <= at THEN 0
                WHEN known.lease_until <= at
                    AND "idem".idem_shown_v1(known.state, known.acquisition, known.owner) = 1 THEN -2
                ELSE "idem".idem_shown_v1(known.state, known.acquisition, known.owner)
            END AS kind
        FROM "idem".idem_records AS known
        WHERE known.ctid >= begin_at AND known.ctid < end_at AND (known.ctid > begin_at OR known.tableoid > relation)
        ORDER BY known.ctid, known.tableoid
        LIMIT most
    ),
    last AS (SELECT part.place, part.of_relation FROM part ORDER BY part.place DESC, part.of_relation DESC LIMIT 1)
    SELECT
        at, count(*), (SELECT last.place::TEXT FROM last), (SELECT last.of_relation::BIGINT FROM last), read_blocks, all_blocks,
        count(*) FILTER (WHERE kind = -1),
        count(*) FILTER (WHERE kind = 1), count(*) FILTER (WHERE kind = -2), count(*) FILTER (WHERE kind = 2),
        count(*) FILTER (WHERE kind = 3), count(*) FILTER (WHERE kind = 4), count(*) FILTER (WHERE kind = 5),
        count(*) FILTER (WHERE kind = 0), coalesce(sum(part.body_bytes), 0)::BIGINT,
        min(part.created_at) FILTER (WHERE kind IN (1, -2)), min(part.expires_at) FILTER (WHERE kind = 0),
        count(*) FILTER (WHERE kind <> -1 AND part.created_at > an_hour_ago),
        count(*) FILTER (WHERE kind IN (-2, 3, 4, 5) AND part.created_at > an_hour_ago)
    FROM part;
END
$$;

-- Public: settles a run in the transaction of its handler, for handlers whose driver is not sqlx 0.9. The documentation of
-- PostgresStore::settle_run_sql has a table of its parameters.
--
-- kind: 'completed' (repeats get the answer) or 'failed' (the same, marked as a failure). A failure that may run again is
-- not settled here: roll back, and return an error from the handler.
-- header_names, header_values: the header fields of the answer, two arrays of the same length.
-- body: NULL if it is not kept.
-- retention_seconds: how long the answer is kept, from 1.
--
-- Raises 25P01 if its transaction has written nothing before: then it may have ended, and its writes with it.
-- Raises IDM03 if the run does not own its record any more, or is settled already. A repetition with the same arguments in
-- the same transaction changes nothing. In another transaction it would let the business writes commit a second time.
CREATE FUNCTION "idem".idem_settle_run_v1(
    record BYTEA, owner BYTEA, kind TEXT, status INTEGER, header_names TEXT[], header_values TEXT[], body BYTEA,
    retention_seconds BIGINT
) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    longest CONSTANT BIGINT := 9223372036854;
    -- The runs that this transaction has settled. Savepoints that are rolled back take theirs with them.
    settled_here CONSTANT TEXT := coalesce(current_setting('idem.settled_runs', TRUE), '');
    run CONSTANT TEXT := encode(record || owner, 'hex');
    wanted CONSTANT SMALLINT := CASE kind WHEN 'completed' THEN 2 WHEN 'failed' THEN 3 END;
    names CONSTANT TEXT[] := coalesce(header_names, '{}');
    contents CONSTANT TEXT[] := coalesce(header_values, '{}');
    fields BYTEA;
BEGIN
    IF wanted IS NULL THEN
        RAISE 'kind must be ''completed'' or ''failed'', not %', coalesce(quote_literal(kind), 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF coalesce(octet_length(record) <> 32, TRUE) OR coalesce(octet_length(owner) <> 16, TRUE) THEN
        RAISE 'record must have 32 bytes and owner 16: pass the id and the owner of the run''s lease'
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF owner = decode(repeat('00', 16), 'hex') THEN
        RAISE 'owner must be that of a lease: no run has the owner of 16 zero bytes'
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF coalesce(status NOT BETWEEN 0 AND 65535, TRUE) THEN
        RAISE 'status must be a number from 0 to 65535, not %', coalesce(status::TEXT, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF cardinality(names) <> cardinality(contents)
        OR array_position(names, NULL) IS NOT NULL OR array_position(contents, NULL) IS NOT NULL
    THEN
        RAISE 'header_names and header_values must have the same length, and no NULL'
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF EXISTS (SELECT FROM unnest(names) AS field (name) WHERE field.name !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$')
        OR EXISTS (SELECT FROM unnest(contents) AS field (content) WHERE field.content ~ '[\x01-\x08\x0a-\x1f\x7f]')
    THEN
        RAISE 'header_names must be names of header fields, and header_values must have no control characters'
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF EXISTS (
        SELECT FROM unnest(names) AS field (name) WHERE lower(field.name COLLATE "C") IN (
            'connection', 'content-length', 'keep-alive', 'proxy-connection', 'te', 'trailer', 'transfer-encoding', 'upgrade'
        )
    ) THEN
        RAISE 'header_names must not describe the first connection, such as content-length: each replay has its own'
        USING ERRCODE = 'invalid_parameter_value';
    ELSIF coalesce(retention_seconds NOT BETWEEN 1 AND longest, TRUE) THEN
        RAISE 'retention_seconds must be a number from 1 to %, not %', longest, coalesce(retention_seconds::TEXT, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        RAISE 'nothing was written in this transaction: call this after the business writes, in their transaction'
        USING ERRCODE = 'no_active_sql_transaction',
        HINT = 'It may have ended unnoticed: some drivers end it when a nested begin fails or is cancelled.';
    END IF;
    -- The transaction holds the record from now on. A client that has vanished must not keep it for ever.
    IF current_setting('idle_in_transaction_session_timeout') = '0' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '10s', TRUE);
    END IF;
    SELECT coalesce(string_agg(int4send(octet_length(part)) || part, '' ORDER BY number, place), '') INTO fields
    FROM (
        SELECT number, place, convert_to(given.part, 'UTF8') AS part
        FROM unnest(names, contents) WITH ORDINALITY AS field (name, content, number)
        CROSS JOIN LATERAL (VALUES (1, lower(field.name COLLATE "C")), (2, field.content)) AS given (place, part)
    ) AS encoded;
    PERFORM FROM "idem".idem_settle_v1(
        0, ARRAY[record], ARRAY[owner], ARRAY[wanted::BIGINT], ARRAY[NULL::BIGINT], ARRAY[status::BIGINT], ARRAY[fields],
        ARRAY[body], ARRAY[retention_seconds * 1000000]
    );
    IF FOUND THEN
        PERFORM set_config('idem.settled_runs', settled_here || ' ' || run, TRUE);
        -- The record may now be kept for longer than before. A transaction that takes long can outlive the end that its
        -- partition knows, and the partition must not be dropped then.
        UPDATE "idem".idem_records AS known SET purge_after = known.expires_at
        WHERE known.id = record AND known.purge_after < known.expires_at;
        RETURN;
    END IF;
    PERFORM FROM "idem".idem_records AS known
    WHERE known.id = record AND known.owner = idem_settle_run_v1.owner AND known.state = wanted
        AND known.status = idem_settle_run_v1.status AND known.headers = fields
        AND known.body IS NOT DISTINCT FROM idem_settle_run_v1.body
        AND strpos(settled_here, run) > 0;
    IF NOT FOUND THEN
        RAISE 'the run does not own its record any more, so its transaction must not commit'
        USING ERRCODE = 'IDM03',
        HINT = 'Roll back. Another run has the operation, or another transaction has settled this run.';
    END IF;
END
$$;
