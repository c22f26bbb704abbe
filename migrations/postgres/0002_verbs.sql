-- The verbs of the store. Each takes many items at once, in arrays, and works them in the order of their ids, so that
-- two processes do not wait for each other in a circle; a statement that calls several of them on rows that are there
-- locks all those rows first. Their names carry a version: a change brings new functions
-- beside these, and processes of both versions work side by side.
--
-- They decide nothing that the state machine of idem-core does not decide; the cases that need more than one look (an
-- old record in the way, a repeated settlement) are left to it: it reads a row, and puts its decision in place with
-- idem_replace_v1 or idem_remove_v1 if the row is still the same.
--
-- Another role may be able to create objects in a schema on the session's path. A function in PL/pgSQL therefore sets a path
-- that leads to pg_catalog alone. The small functions in SQL have none, as the planner would not inline them then: their names
-- are bound when they are created, and qualified.
--
-- "skew" is added to the server's clock; it is 0 outside of tests. A lock is 64 bits of a record id: held exclusively
-- by the transaction in which an operation runs, shared by a statement that makes a record. That transaction then holds
-- a second one exclusively, lock # 2, which lookups try. Lookups must not hold the first one, not even for a moment: a
-- transaction that begins would take them for another run.
--
-- The planner is told to use the index, and to keep its plans: one made anew for each call takes longer than the call.
-- A plan made while the table was nearly empty must not read the whole table when it no longer is. So wherever records are
-- looked for, there is no other way to them than by their ids: OFFSET 0 keeps a subquery apart from what is around it, and
-- ANY (ARRAY[wanted.id]) is an equality that no plan can merge by, so that each item looks for its record in the index, and
-- none reads all of it or compares each item with each record. The purge is left to the planner: what it finds depends on what is in the table.

-- A time "by" microseconds later, at most the last one that there is; NULL when "by" is.
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

-- Where rows are spread over partitions, no index can tell that two of them have the same id. There, this keeps others
-- from making a record with one of these ids until the transaction ends; where there is one table, its index does.
CREATE FUNCTION "idem".idem_exclude_v1(locks BIGINT[]) RETURNS VOID
LANGUAGE sql VOLATILE
RETURN NULL::pg_catalog.void;

-- Makes the records that are not there yet, and reads those that are.
--
-- seen: 1 made, 2 there, 3 not there, because a transaction runs the operation, 4 not there when it was looked for, and
-- made by somebody else since: ask again.
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
    -- Before anything else: whoever spreads the records over partitions has then done so, and the next statement excludes
    -- as it is done there.
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
            -- It may have become free since this statement took its snapshot, by a transaction that made the record. Then
            -- the insert meets that record and does nothing.
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

-- Reads records. Where a lock is given, it also says whether a transaction runs the operation (seen 3) or not (seen 2
-- when there is a record, else 4).
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
    -- Before the rows are read, in a statement of its own: whoever ran the operation until now has then committed, and
    -- the next statement sees what it made.
    --
    -- The lock is released at once. A transaction that begins waits for it.
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

-- Locks rows in the order of their ids, for a statement that calls several of the functions below.
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

-- Extends leases; answers the items that it applied to.
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

-- Records recovery points; answers the items that it applied to. The first four bytes of the data are the sequence: one that does
-- not follow the stored one is not applied, unless it is the same.
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

-- Ends runs; answers the items that it applied to. "waits" says when a retryable failure may run again, and is NULL for
-- every other end.
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
        -- What is to run again needs what it left behind.
        checkpoint_name = CASE WHEN wanted.state = 5 THEN known.checkpoint_name END,
        checkpoint_data = CASE WHEN wanted.state = 5 THEN known.checkpoint_data END,
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

-- Removes the records of first runs that give back; answers the items that it applied to. A record that an earlier run
-- left behind is not removed: the state machine decides on it.
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
            ELSE known.acquisition <> 4
        END
    RETURNING wanted.number;
END
$$;

-- Puts a decision of the state machine in the place of the row that it was made on, if that is still the same row.
-- Answers 1: done; 2: another row by now; 3: a transaction runs the operation (looked at where a lock is given).
CREATE FUNCTION "idem".idem_replace_v1(
    id BYTEA, lock BIGINT, version BIGINT, format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA,
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
    WHERE known.id = idem_replace_v1.id AND known.xmin::TEXT::BIGINT = version;
    RETURN CASE WHEN FOUND THEN 1 ELSE 2 END;
EXCEPTION WHEN serialization_failure THEN
    -- It has moved to another partition meanwhile.
    RETURN 2;
END
$$;

-- Removes the row that the state machine decided on, if that is still the same row: 1 done, 2 another row by now.
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
    -- It has moved to another partition meanwhile.
    RETURN 2;
END
$$;

-- Drops the prepared statements that sqlx left in a session which a transaction-pooling proxy has given to somebody else
-- by now. sqlx names statements by a number that counts anew on every connection to the proxy, so those of two clients
-- are called the same.
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

-- Makes or replaces a record as settled, in the transaction in which its operation ran, which has held the lock since.
-- Fails with the state IDM01 when the record is not the one that the transaction began with (version NULL: none). Waits for
-- others at most "patience" milliseconds, whatever lock_timeout the handler has set, and leaves that as it is.
--
-- "was_over": the row had expired when the transaction began. A purge may have removed it since, or a dropped partition. Then
-- a new row is made: while the lock is held, no other session makes one.
--
-- "mark" is given where the handler's writes are discarded: the value of the setting idem.mark before the store's savepoint.
-- Fails with the state IDM02 if the setting has another value: ROLLBACK TO then went to a savepoint of the handler's that has
-- the same name.
CREATE FUNCTION "idem".idem_put_v1(
    patience BIGINT, skew BIGINT, id BYTEA, lock BIGINT, version BIGINT, namespace BYTEA, principal BYTEA,
    operation BYTEA, format SMALLINT, fingerprint_algorithm INTEGER, fingerprint BYTEA, owner BYTEA, attempt BIGINT,
    state SMALLINT, wait BIGINT, checkpoint_name BYTEA, checkpoint_data BYTEA, status INTEGER, headers BYTEA,
    body BYTEA, created_at BIGINT, retention BIGINT, was_over BOOLEAN, mark BIGINT
) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_indexscan = on SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = 0
AS $$
#variable_conflict use_variable
DECLARE
    at CONSTANT BIGINT := "idem".idem_now_v1(skew);
    not_before CONSTANT BIGINT := "idem".idem_later_v1(at, wait);
    expires_at CONSTANT BIGINT := "idem".idem_later_v1(coalesce(not_before, at), retention);
BEGIN
    IF mark IS NOT NULL AND pg_catalog.current_setting('idem.mark', TRUE) IS DISTINCT FROM mark::pg_catalog.text THEN
        RAISE 'the handler has made a savepoint with the name of the store''s' USING ERRCODE = 'IDM02';
    END IF;
    PERFORM pg_catalog.set_config('lock_timeout', patience::TEXT, TRUE);
    LOCK TABLE "idem".idem_records IN ROW EXCLUSIVE MODE;
    -- A statement that makes this record for somebody else, and has looked before this one commits, must not go on then.
    PERFORM "idem".idem_exclude_v1(ARRAY[lock]);
    IF version IS NOT NULL THEN
        UPDATE "idem".idem_records AS known SET
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
        IF FOUND THEN
            RETURN;
        END IF;
        IF NOT was_over OR EXISTS (SELECT FROM "idem".idem_records AS known WHERE known.id = idem_put_v1.id) THEN
            RAISE 'the record belongs to somebody else by now' USING ERRCODE = 'IDM01';
        END IF;
    END IF;
    INSERT INTO "idem".idem_records (
        id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state,
        not_before, checkpoint_name, checkpoint_data, status, headers, body, created_at, updated_at, expires_at,
        purge_after
    ) VALUES (
        id, pg_catalog.convert_from(namespace, 'UTF8'), pg_catalog.convert_from(principal, 'UTF8'),
        pg_catalog.convert_from(operation, 'UTF8'), format, fingerprint_algorithm, fingerprint, owner, attempt, state,
        not_before, checkpoint_name, checkpoint_data, status, headers, body, created_at, at, expires_at, expires_at
    )
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE 'the record belongs to somebody else by now' USING ERRCODE = 'IDM01';
    END IF;
END
$$;

-- Whether this owner runs the operation now; for the business writes of an operation that runs outside of a transaction
-- of the store. The record stays as it is until the transaction ends that asks this, so that nobody can take the
-- operation over between the question and the write; nor can a transaction begin to.
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
    RETURN FOUND;
END
$$;

-- Removes at most "most" records whose time is over, and says how many. Rows that somebody else works on are left to
-- them. When there is nothing more to remove, it notes the later end of settled rows that live longer than was thought
-- when they were made, so that they are not looked at again and again; a minute is not worth a write. A row that may run
-- again is left as it is: a transaction that runs it would find it changed.
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
            -- A key that is over is used again, and its row has moved to another partition since the statement began.
            IF round = rounds THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$$;
