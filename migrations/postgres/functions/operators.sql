-- What operators change: single jobs, limits of keys, pauses (slots.md C5, B6); and what has been kept long enough.
--
-- What must stay true: a job's state row is locked before its keys, wherever it is; whatever takes a job out of a line or
-- off a slot goes on to `warp.leave` or hands the keys on itself.
--
-- Answers of a command about one job: -1 no such job, -2 done, -3 requested, else the place that does not allow it.

-- A job's one state row, locked; its place tells the table. It may move while it is looked for: then it is looked for
-- again. All NULL if there is no such job. Indexes: job_id, the primary keys, of `running` host by host.
CREATE OR REPLACE FUNCTION warp.lock_job(p_id uuid) RETURNS warp.state_row LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_job bigint;
    v_row warp.state_row;
BEGIN
    FOR v_try IN 1 .. 1000 LOOP
        SELECT j.handle INTO v_job FROM warp.job j WHERE j.id = p_id;
        EXIT WHEN NOT FOUND;
        SELECT * INTO v_row FROM warp.ready s WHERE s.handle = v_job FOR UPDATE;
        IF FOUND THEN RETURN v_row; END IF;
        SELECT * INTO v_row FROM warp.waiting s WHERE s.handle = v_job FOR UPDATE;
        IF FOUND THEN RETURN v_row; END IF;
        SELECT s.* INTO v_row FROM warp.host h JOIN warp.running s ON s.host = h.id AND s.handle = v_job FOR UPDATE OF s;
        IF FOUND THEN RETURN v_row; END IF;
        SELECT * INTO v_row FROM warp.ended s WHERE s.handle = v_job FOR UPDATE;
        IF FOUND THEN RETURN v_row; END IF;
        IF v_try = 1000 THEN
            RAISE EXCEPTION 'job % has no state', p_id;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Ends a job as Deleted; of a running one the end is asked for.
CREATE OR REPLACE FUNCTION warp.cancel_job(p_id uuid, p_by text, p_now bigint) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_row warp.state_row := warp.lock_job(p_id);
BEGIN
    IF v_row.handle IS NULL THEN
        RETURN -1;
    ELSIF v_row.place >= 10 THEN
        RETURN v_row.place;
    ELSIF v_row.place = 4 THEN
        INSERT INTO warp.cancel_request AS c (job, token, asked_by) VALUES (v_row.handle, v_row.token, p_by)
        ON CONFLICT (job) DO UPDATE SET token = excluded.token, asked_by = excluded.asked_by WHERE c.token <> excluded.token;
        IF FOUND THEN
            INSERT INTO warp.audit (job, at, event, run, runs, message, host, digest)
            VALUES (v_row.handle, v_now, 9, v_row.run, v_row.run, 'by ' || p_by, v_row.host, v_row.digest);
            PERFORM warp.announce(array[v_row.lane]);
        END IF;
        RETURN -3;
    END IF;
    DELETE FROM warp.ready s WHERE s.handle = v_row.handle;
    DELETE FROM warp.waiting s WHERE s.handle = v_row.handle;
    PERFORM warp.lock_keys(v_row.keys);
    PERFORM warp.leave(v_row, jsonb_build_object('to', 'cancelled', 'by', p_by), NULL, v_now);
    PERFORM warp.announce_keys(v_row.keys);
    RETURN -2;
END $$;

-- Makes an ended or Scheduled job Enqueued again, its retry budget afresh. Refused for an ended one whose unique key another
-- job has now.
CREATE OR REPLACE FUNCTION warp.requeue_job(p_id uuid, p_by text, p_now bigint) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_row warp.state_row := warp.lock_job(p_id);
    v_unique_key text;
BEGIN
    IF v_row.handle IS NULL THEN
        RETURN -1;
    ELSIF v_row.place NOT IN (0, 10, 11, 12) THEN
        RETURN v_row.place;
    END IF;
    IF v_row.place >= 10 THEN
        SELECT j.unique_key INTO v_unique_key FROM warp.job j WHERE j.handle = v_row.handle;
        IF v_unique_key IS NOT NULL THEN
            INSERT INTO warp.unique_key (key, job) VALUES (v_unique_key, v_row.handle) ON CONFLICT (key) DO NOTHING;
            IF NOT FOUND THEN
                RETURN v_row.place;
            END IF;
            v_row.is_unique := true;
        END IF;
        PERFORM warp.count(warp.kept_counter(v_row.place), NULL, -1);
        UPDATE warp.outcome o SET result = NULL, error = NULL WHERE o.job = v_row.handle;
        IF v_row.place = 10 THEN
            -- Until now the row itself told of its last run.
            INSERT INTO warp.audit (job, at, event, run, runs, host, digest, took_us)
            VALUES (v_row.handle, v_row.claimed_at, 2, v_row.run, v_row.run, v_row.host, v_row.digest, NULL),
                   (v_row.handle, v_row.changed_at, 3, v_row.run, v_row.run, v_row.host, v_row.digest, v_row.took_us);
        END IF;
    END IF;
    INSERT INTO warp.audit (job, at, event, run, runs, message) VALUES (v_row.handle, v_now, 7, 0, v_row.run, 'by ' || p_by);
    PERFORM warp.count('stats:requeued', 'manual', 1);
    DELETE FROM warp.ended s WHERE s.handle = v_row.handle;
    DELETE FROM warp.waiting s WHERE s.handle = v_row.handle;
    v_row.place := 1;
    v_row.due := v_now;
    v_row.changed_at := v_now;
    v_row.attempt := 0;
    v_row.deaths := 0;
    v_row.host := NULL;
    INSERT INTO warp.ready VALUES (v_row.*);
    PERFORM warp.announce(array[v_row.lane]);
    RETURN -2;
END $$;

-- The counter of ended rows that are still there.
CREATE OR REPLACE FUNCTION warp.kept_counter(p_place smallint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_place WHEN 10 THEN 'kept:completed' WHEN 11 THEN 'kept:failed' WHEN 12 THEN 'kept:deleted' END
$$;

-- Removes jobs and everything about them but their state rows. Primary keys, and unique_key_job.
CREATE OR REPLACE FUNCTION warp.remove_jobs(p_jobs bigint[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
BEGIN
    DELETE FROM warp.unique_key u WHERE u.job = ANY (p_jobs);
    DELETE FROM warp.audit a WHERE a.job = ANY (p_jobs);
    DELETE FROM warp.log l WHERE l.job = ANY (p_jobs);
    DELETE FROM warp.progress p WHERE p.job = ANY (p_jobs);
    DELETE FROM warp.outcome o WHERE o.job = ANY (p_jobs);
    DELETE FROM warp.cancel_request c WHERE c.job = ANY (p_jobs);
    DELETE FROM warp.job j WHERE j.handle = ANY (p_jobs);
END $$;

-- Removes a job and everything about it; refused while it runs.
CREATE OR REPLACE FUNCTION warp.delete_job(p_id uuid, p_now bigint) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_row warp.state_row := warp.lock_job(p_id);
BEGIN
    IF v_row.handle IS NULL THEN
        RETURN -1;
    ELSIF v_row.place = 4 THEN
        RETURN v_row.place;
    END IF;
    DELETE FROM warp.ready s WHERE s.handle = v_row.handle;
    DELETE FROM warp.waiting s WHERE s.handle = v_row.handle;
    DELETE FROM warp.ended s WHERE s.handle = v_row.handle;
    IF v_row.place >= 10 THEN
        PERFORM warp.count(warp.kept_counter(v_row.place), NULL, -1);
    ELSIF v_row.keys IS NOT NULL THEN
        PERFORM warp.lock_keys(v_row.keys);
        PERFORM warp.unblock(v_row.handle, v_row.keys, v_now);
        PERFORM warp.release(v_row.handle, v_row.keys, v_now);
        IF v_row.place = 1 AND v_row.parked_on IS NOT NULL AND warp.by_session() THEN
            -- A7: it has not tried the key that it was woken for.
            PERFORM warp.session_wake_missing(v_row.parked_on, 1, 0, v_now);
        END IF;
        PERFORM warp.announce_keys(v_row.keys);
    END IF;
    PERFORM warp.remove_jobs(array[v_row.handle]);
    RETURN -2;
END $$;

-- B6: the operator's limit of a key, drawn if it is new; its number. The row that is written is the key's lock; what the
-- limit lets in is handed on in the statements after it.
CREATE OR REPLACE FUNCTION warp.set_limit(p_key text, p_limit int, p_by text, p_now bigint) RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_key bigint;
BEGIN
    INSERT INTO warp.conc_key AS c (key, admin_limit, set_by, set_at, high, version)
    VALUES (p_key, p_limit, p_by, v_now, greatest(p_limit, 1), 1)
    ON CONFLICT (key) DO UPDATE
       SET admin_limit = excluded.admin_limit, set_by = excluded.set_by, set_at = excluded.set_at,
           high = greatest(c.high, c.admin_limit, excluded.high), version = c.version + 1
    RETURNING c.id INTO v_key;
    PERFORM warp.hand_on(v_key, v_now);
    PERFORM warp.announce_keys(array[v_key]);
    RETURN v_key;
END $$;

-- B6: back to the stamps; whether there was a limit.
CREATE OR REPLACE FUNCTION warp.remove_limit(p_key text, p_now bigint) RETURNS bool LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_key bigint;
BEGIN
    UPDATE warp.conc_key c
       SET admin_limit = NULL, set_by = NULL, set_at = NULL, high = greatest(c.high, c.admin_limit), version = c.version + 1
     WHERE c.key = p_key AND c.admin_limit IS NOT NULL RETURNING c.id INTO v_key;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM warp.hand_on(v_key, coalesce(p_now, warp.clock()));
    PERFORM warp.announce_keys(array[v_key]);
    RETURN true;
END $$;

-- Pauses a queue, or ends that; whether anything changed. Its waiters are passed over from now on, or count again. What was
-- reserved for them is left to the expiry of reservations.
CREATE OR REPLACE FUNCTION warp.pause_queue(p_queue text, p_by text, p_now bigint) RETURNS bool LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_before int[] := warp.lock_lanes();
BEGIN
    INSERT INTO warp.queue_pause (queue, paused_by, paused_at) VALUES (p_queue, p_by, v_now) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM warp.hand_on_changed(v_before, v_now);
    -- Hosts have jobs of it to hand back.
    PERFORM pg_notify('warp', p_queue);
    RETURN true;
END $$;

CREATE OR REPLACE FUNCTION warp.resume_queue(p_queue text, p_now bigint) RETURNS bool LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_before int[] := warp.lock_lanes();
BEGIN
    DELETE FROM warp.queue_pause q WHERE q.queue = p_queue;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM warp.hand_on_changed(v_before, coalesce(p_now, warp.clock()));
    PERFORM pg_notify('warp', p_queue);
    RETURN true;
END $$;

-- Pauses a host, or (with nobody's name) ends that; whether anything changed, NULL if it is not registered.
CREATE OR REPLACE FUNCTION warp.pause_host(p_host int, p_by text, p_now bigint) RETURNS bool LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_before int[];
    v_paused bool;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('warp.host'), p_host);
    v_before := warp.lock_lanes();
    SELECT h.paused_at IS NOT NULL INTO v_paused FROM warp.host h WHERE h.id = p_host FOR UPDATE;
    IF v_paused IS NULL OR v_paused = (p_by IS NOT NULL) THEN
        RETURN CASE WHEN v_paused IS NOT NULL THEN false END;
    END IF;
    UPDATE warp.host h SET paused_by = p_by, paused_at = CASE WHEN p_by IS NOT NULL THEN v_now END WHERE h.id = p_host;
    PERFORM warp.hand_on_changed(v_before, v_now);
    -- It has jobs to hand back, or to claim, whoever else serves the same.
    PERFORM warp.announce(array(
        SELECT l.id FROM warp.host_contract c JOIN warp.lane l ON l.contract = c.contract WHERE c.host = p_host));
    RETURN true;
END $$;

-- Deletes what has ended long enough ago, oldest first, at most so many jobs and one caller at a time; how many. Each age in
-- milliseconds, NULL for ever. Index: ended_at, one range per state and lane; what an operator holds is passed over.
CREATE OR REPLACE FUNCTION warp.prune(p_completed bigint, p_deleted bigint, p_failed bigint, p_max int, p_now bigint)
RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_left int := p_max;
    v_kept record;
    v_jobs bigint[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('warp.prune'), 0) THEN
        RETURN 0;
    END IF;
    FOR v_kept IN SELECT k.place, k.age FROM (VALUES (10::smallint, p_completed), (12::smallint, p_deleted), (11::smallint, p_failed)) k (place, age)
                   WHERE k.age IS NOT NULL LOOP
        EXIT WHEN v_left <= 0;
        WITH gone AS (
            DELETE FROM warp.ended e WHERE e.handle = ANY (array(
                SELECT f.handle FROM warp.ended f WHERE f.handle = ANY (array(
                    SELECT o.handle FROM warp.lane l
                     CROSS JOIN LATERAL (
                            SELECT a.handle, a.changed_at FROM warp.ended a
                             WHERE a.place = v_kept.place AND a.lane = l.id AND a.changed_at <= v_now - v_kept.age
                             ORDER BY a.changed_at LIMIT v_left) o
                     ORDER BY o.changed_at LIMIT v_left))
                   FOR UPDATE SKIP LOCKED)) RETURNING e.handle)
        SELECT array_agg(g.handle) INTO v_jobs FROM gone g;
        CONTINUE WHEN v_jobs IS NULL;
        PERFORM warp.remove_jobs(v_jobs);
        PERFORM warp.count(warp.kept_counter(v_kept.place), NULL, -cardinality(v_jobs));
        v_left := v_left - cardinality(v_jobs);
    END LOOP;
    RETURN p_max - v_left;
END $$;

-- ------------------------------------------------------------------------------------------------- questions
-- They lock nothing. STABLE: all parts of an answer are of one snapshot.

-- Who holds a key. Session locks stand in no row: there it is who has run with the key for longest, as many as its limit
-- ever allowed; whoever runs beyond that waits inside its host. Primary key of slot; the running rows of all hosts.
CREATE OR REPLACE FUNCTION warp.key_holders(p_key bigint, p_high int) RETURNS TABLE (job bigint, number int, stamped int, since bigint, host int)
LANGUAGE sql STABLE AS $$
    SELECT s.job, s.number, s.stamped, s.since, s.host FROM warp.slot s WHERE s.key = p_key
    UNION ALL
    (SELECT r.handle, (row_number() OVER (ORDER BY r.token))::int - 1, coalesce(p.slots, 1), r.claimed_at, r.host
       FROM warp.running r LEFT JOIN warp.policy p ON p.id = r.stamp
      WHERE (SELECT t.locks = 'session' FROM warp.setting t) AND r.keys @> array[p_key]
      ORDER BY r.token LIMIT p_high)
$$;

-- A key with everybody who holds it and, up to so many, who waits, as JSON: [key, admin limit, number of waiters,
-- [[job, contract, host or null, slot, stamped limit, since]], [[job, contract, limit, weight, since, claimable]]].
-- Indexes: primary keys of conc_key, slot and job; waiting_parked in its order.
CREATE OR REPLACE FUNCTION warp.key_seen(p_key bigint, p_listed int) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT json_build_array(
        c.key, c.admin_limit,
        (SELECT count(*) FROM warp.waiting w WHERE w.place = 2 AND w.parked_on = c.id),
        (SELECT coalesce(json_agg(json_build_array(j.id, l.contract, n.name, s.number, s.stamped, s.since) ORDER BY s.number), '[]')
           FROM warp.key_holders(c.id, c.high) s JOIN warp.job j ON j.handle = s.job JOIN warp.lane l ON l.id = j.lane
           LEFT JOIN warp.host_name n ON n.id = s.host),
        (SELECT coalesce(json_agg(json_build_array(j.id, l.contract, coalesce(p.slots, 1), coalesce(p.weight, 1), w.changed_at,
                                                   EXISTS (SELECT FROM warp.claimable_lane a WHERE a.lane = w.lane)) ORDER BY w.ticket), '[]')
           FROM (SELECT * FROM warp.waiting w WHERE w.place = 2 AND w.parked_on = c.id ORDER BY w.ticket LIMIT p_listed) w
           JOIN warp.job j ON j.handle = w.handle JOIN warp.lane l ON l.id = w.lane LEFT JOIN warp.policy p ON p.id = w.stamp)
    )::text FROM warp.conc_key c WHERE c.id = p_key
$$;

-- State rows in these places and lanes, each reached by equality on both (OFFSET 0 keeps the planner from another way). For
-- callers that want them up to a LIMIT, so it has to stay a single query that is put in their place.
-- Indexes: ready_due, ready_reserved, waiting_lane, ended_at; the primary key of `running` host by host.
CREATE OR REPLACE FUNCTION warp.rows_in(p_places smallint[], p_lanes int[]) RETURNS SETOF warp.state_row LANGUAGE sql STABLE AS $$
    SELECT s.* FROM unnest(p_lanes) l (lane)
     CROSS JOIN LATERAL (SELECT r.* FROM warp.ready r WHERE r.place = 1 AND r.lane = l.lane OFFSET 0) s WHERE 1 = ANY (p_places)
    UNION ALL
    SELECT s.* FROM unnest(p_lanes) l (lane)
     CROSS JOIN LATERAL (SELECT r.* FROM warp.ready r WHERE r.place = 3 AND r.lane = l.lane OFFSET 0) s WHERE 3 = ANY (p_places)
    UNION ALL
    SELECT s.* FROM unnest(p_places) p (place) CROSS JOIN unnest(p_lanes) l (lane)
     CROSS JOIN LATERAL (SELECT w.* FROM warp.waiting w WHERE w.lane = l.lane AND w.place = p.place OFFSET 0) s WHERE p.place IN (0, 2, 5)
    UNION ALL
    SELECT s.* FROM warp.host h CROSS JOIN LATERAL (SELECT r.* FROM warp.running r WHERE r.host = h.id OFFSET 0) s
     WHERE 4 = ANY (p_places) AND s.lane = ANY (p_lanes)
    UNION ALL
    SELECT s.* FROM unnest(p_places) p (place) CROSS JOIN unnest(p_lanes) l (lane)
     CROSS JOIN LATERAL (SELECT e.* FROM warp.ended e WHERE e.place = p.place AND e.lane = l.lane OFFSET 0) s WHERE p.place IN (10, 11, 12)
$$;

-- Jobs in a list, newest first by id; a NULL filter is none. Where few jobs are in these places and lanes, it begins with
-- their state rows. Else it walks job_id backwards until enough have passed, and where that leads far without finding
-- them, it begins with the state rows after all, if those are not very many. So it reads at most some hundred thousand rows
-- but where that many fit the filter and none of them is among the newest jobs; there, and for a rare key, which no
-- index knows once its jobs have ended, it walks on.
-- Indexes: those of warp.rows_in; job_id, and the primary keys, of `running` host by host.
CREATE OR REPLACE FUNCTION warp.list_jobs(
    p_places smallint[], p_contract text, p_queue text, p_key text, p_before uuid, p_most bigint
) RETURNS TABLE (
    id uuid, contract text, queue text, place smallint, run int, attempt int, created_at bigint, changed_at bigint, due bigint
) LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_few CONSTANT int := 20000;
    v_many CONSTANT int := 200000;
    v_far CONSTANT int := 50000;
    v_places smallint[] := coalesce(p_places, '{0,1,2,3,4,5,10,11,12}');
    v_lanes int[] := array(SELECT l.id FROM warp.lane l
                            WHERE (p_contract IS NULL OR l.contract = p_contract) AND (p_queue IS NULL OR l.queue = p_queue));
    v_key bigint;
    v_filters bool := p_places IS NOT NULL OR p_contract IS NOT NULL OR p_queue IS NOT NULL;
    v_begins_with_rows bool;
    v_end uuid;
BEGIN
    IF p_key IS NOT NULL THEN
        SELECT c.id INTO v_key FROM warp.conc_key c WHERE c.key = p_key;
    END IF;
    IF cardinality(v_lanes) = 0 OR p_key IS NOT NULL AND v_key IS NULL THEN
        RETURN;
    END IF;
    v_begins_with_rows := v_filters AND v_few > (SELECT count(*) FROM (SELECT FROM warp.rows_in(v_places, v_lanes) LIMIT v_few) c);
    IF v_filters AND NOT v_begins_with_rows THEN
        -- How far a walk may go: the job behind the last one of that many, if there is one.
        SELECT j.id INTO v_end FROM warp.job j WHERE j.id < coalesce(p_before, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
         ORDER BY j.id DESC OFFSET v_far LIMIT 1;
        IF FOUND AND p_most > (SELECT count(*) FROM (
               SELECT FROM warp.jobs_walked(v_places, v_lanes, v_key, p_before, v_end) LIMIT p_most) c) THEN
            v_begins_with_rows := v_many > (SELECT count(*) FROM (SELECT FROM warp.rows_in(v_places, v_lanes) LIMIT v_many) c);
        END IF;
    END IF;
    IF v_begins_with_rows THEN
        RETURN QUERY
        WITH s AS MATERIALIZED (SELECT * FROM warp.rows_in(v_places, v_lanes))
        SELECT j.id, l.contract, l.queue, s.place, s.run, s.attempt, j.created_at, s.changed_at, s.due
          FROM s
         CROSS JOIN LATERAL (SELECT * FROM warp.job j WHERE j.handle = s.handle OFFSET 0) j
         CROSS JOIN LATERAL (SELECT * FROM warp.lane l WHERE l.id = j.lane OFFSET 0) l
         WHERE (v_key IS NULL OR s.keys @> array[v_key]) AND (p_before IS NULL OR j.id < p_before)
         ORDER BY j.id DESC LIMIT p_most;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT w.id, l.contract, l.queue, w.place, w.run, w.attempt, w.created_at, w.changed_at, w.due
      FROM warp.jobs_walked(v_places, v_lanes, v_key, p_before, NULL) w JOIN warp.lane l ON l.id = w.lane
     ORDER BY w.id DESC LIMIT p_most;
END $$;

-- The jobs of a filter that have ids before one and not before another, newest first if its caller says so. One query, put
-- in the place of its calls. Indexes: job_id, and the primary keys, of `running` host by host.
CREATE OR REPLACE FUNCTION warp.jobs_walked(p_places smallint[], p_lanes int[], p_key bigint, p_before uuid, p_end uuid) RETURNS TABLE (
    id uuid, lane int, created_at bigint, place smallint, run int, attempt int, changed_at bigint, due bigint
) LANGUAGE sql STABLE AS $$
    SELECT j.id, j.lane, j.created_at, s.place, s.run, s.attempt, s.changed_at, s.due
      FROM warp.job j
     CROSS JOIN LATERAL (
            SELECT * FROM warp.ready r WHERE r.handle = j.handle
            UNION ALL SELECT * FROM warp.waiting w WHERE w.handle = j.handle
            UNION ALL SELECT r.* FROM warp.host h JOIN warp.running r ON r.host = h.id AND r.handle = j.handle
            UNION ALL SELECT * FROM warp.ended e WHERE e.handle = j.handle) s
     WHERE j.id < coalesce(p_before, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AND j.id >= coalesce(p_end, '00000000-0000-0000-0000-000000000000')
       AND j.lane = ANY (p_lanes) AND s.place = ANY (p_places) AND (p_key IS NULL OR s.keys @> array[p_key])
$$;

-- Queues in which something lies now, the deepest first: what is ready (or reserved), running, scheduled, parked, and since when
-- the first of the ready ones could run. Each figure is counted up to 10,000 for each contract of the queue, less where
-- there are many lanes, so that whatever lies there at most some 600,000 entries of indexes are read, and mostly few.
-- Indexes: those of warp.rows_in; all of `running`, which is what the hosts have workers for.
CREATE OR REPLACE FUNCTION warp.queues_seen(p_most int) RETURNS TABLE (
    queue text, ready bigint, running bigint, scheduled bigint, parked bigint, oldest bigint
) LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_most bigint := (SELECT greatest(100, least(10000, 200000 / greatest(count(*), 1))) FROM warp.lane);
BEGIN
    RETURN QUERY
    WITH busy AS MATERIALIZED (
        SELECT r.lane, count(*) AS runs FROM warp.host h CROSS JOIN LATERAL (SELECT x.lane FROM warp.running x WHERE x.host = h.id) r GROUP BY r.lane
    ), deep AS (
        SELECT l.queue,
               sum(d.due + d.reserved)::bigint AS ready, sum(coalesce(b.runs, 0))::bigint AS running,
               sum(w.scheduled)::bigint AS scheduled, sum(w.parked)::bigint AS parked, min(d.first) AS oldest
          FROM warp.lane l LEFT JOIN busy b ON b.lane = l.id
         CROSS JOIN LATERAL (SELECT
               (SELECT count(*) FROM (SELECT FROM warp.ready r WHERE r.place = 1 AND r.lane = l.id LIMIT v_most) c) AS due,
               (SELECT count(*) FROM (SELECT FROM warp.ready r WHERE r.place = 3 AND r.lane = l.id LIMIT v_most) c) AS reserved,
               (SELECT r.due FROM warp.ready r WHERE r.place = 1 AND r.lane = l.id ORDER BY r.due LIMIT 1) AS first) d
            -- The place is no constant here, so that no index of one place alone is taken for one of lanes.
         CROSS JOIN LATERAL (
               SELECT sum(c.jobs) FILTER (WHERE c.place = 0) AS scheduled, sum(c.jobs) FILTER (WHERE c.place = 2) AS parked
                 FROM (SELECT p.place, (SELECT count(*) FROM (
                              SELECT FROM warp.waiting x WHERE x.lane = l.id AND x.place = p.place LIMIT v_most) y) AS jobs
                         FROM unnest('{0,2}'::smallint[]) p (place)) c) w
         GROUP BY l.queue)
    SELECT d.queue, d.ready, d.running, d.scheduled, d.parked, d.oldest FROM deep d
     WHERE d.ready + d.running + d.scheduled + d.parked > 0
     ORDER BY d.ready + d.running + d.scheduled + d.parked DESC, d.queue COLLATE "C" LIMIT p_most;
END $$;
