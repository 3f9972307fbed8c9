-- A host's round trip: ends of runs first, then new work, in one statement (slots.md C2, B2, B3).
--
-- A claim of a job that has no stamp yet needs its keys, and those come from its payload, which only the host reads. So a
-- first call stops at such jobs and returns their payloads (an unlocked look), and a second call brings stamp and keys
-- (`k_…`) and decides: everything that the ledger does to a job happens in that one transaction.
--
-- Locks: the host shared (a rescue takes it exclusively, so no claim commits for a host that is being taken away);
-- the names of the shared state that the ends write, in one order; the running rows of the ends; candidates with SKIP
-- LOCKED; all keys of the ends and of the candidates in sight in ascending order; keys that turn up later only if nobody
-- holds them, else their jobs stay for the next call. A slot that passes on inside the host (B8) is re-pointed without its
-- key's row: how many there are does not change.
-- Indexes: ready_due and ready_reserved (one range per lane, by due time), ready_special, the primary keys, waiting_due.
--
-- Answer, one row per thing by `kind`: 0 the summary (`job` the next due time, `token` now, the rest JSON in `payload`),
-- 1 a verdict that is not Settled (`ord`, `run`: 1
-- repeated, 2 late, 3 conflicted), 2 a claimed run in the order of page (`ord`), due time and job, 3 a candidate that
-- needs stamp and keys. `lane` is the number of the lane, not its place among the parameters.
-- Under session locks also: 4 what a claimed run wants of its lock session (`ord` whether it had been started or parked,
-- `token` the key that it was woken for, its keys in `payload`), 5 the operator's limit (`ord`) and the version (`token`) of
-- a key that the host holds, 6 a key on which this call has parked. 7: a slot was passed to the run of this `token`, and
-- is not there. `slot_key` of a claimed run: the key whose slot may pass on inside the host, which it holds or, where
-- `explicit` is 1, waits for (B8).
CREATE OR REPLACE FUNCTION warp.exchange(
    p_host int, p_now bigint,
    -- Ends as Completed that leave nothing but a result and lines: place in the batch, job, token, µs, result.
    s_ord int[], s_job bigint[], s_token bigint[], s_took bigint[], s_result text[],
    -- All other ends: [{"ord", "job", "token", "took", "exit", "on_conflict", "state", "progress", "dropped"}].
    s_other jsonb,
    -- Lines of output and log, and children, each with the `ord` of its end.
    l_ord int[], l_job bigint[], l_at bigint[], l_stream text[], l_body text[],
    h_ord int[], h_id uuid[], h_lane int[], h_payload text[], h_metadata text[], h_trace text[], h_due bigint[], h_explicit int[], h_unique text[],
    -- Lanes that the host can run, each with the stamp of jobs that declare nothing, whether that has a key, and the digest.
    c_lane int[], c_stamp int[], c_keyed bool[], c_digest int[], c_max int,
    -- Where a lane is known to hold much: due time and job up to which the host has just claimed all there was, else NULL.
    c_from_due bigint[], c_from_job bigint[],
    -- What the host has resolved and rendered: job, stamp, keys as an array's text, or why its policy cannot be applied.
    k_job bigint[], k_stamp int[], k_keys text[], k_error text[],
    -- What earlier calls of this exchange reserved or woke, and how long the page was that they stopped at.
    k_reserved bigint[], k_page int,
    -- Under session locks, what the host owes and has: {"parks", "wakes", "looks", "room", "held"}. NULL is the ledger.
    p_session jsonb,
    -- Slots that passed on inside the host, each once with its last holder: key, from whom, to whom. Beside the ends, whose
    -- slot has passed on. And of which keys the host would take local waiters, and how many.
    n_key bigint[], n_from bigint[], n_from_token bigint[], n_to bigint[], n_to_token bigint[], s_passed bool[],
    w_key bigint[], w_most int[],
    -- How many local waiters may come beyond `c_max`.
    w_extra int
) RETURNS TABLE (
    kind smallint, ord int, job bigint, id uuid, token bigint, run int, attempt int, lane int, stamp int, keyed bool,
    created_at bigint, due bigint, payload text, metadata text, trace_parent text, explicit int, slot_key bigint
)
LANGUAGE plpgsql
-- Every query here is a short walk along an index whatever the statistics say; none may flip to reading a table.
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_bitmapscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    v_done int[];
    v_end record;
    v_row warp.state_row;
    v_rows warp.state_row[] := '{}';
    v_exits jsonb[] := '{}';
    v_took bigint[] := '{}';
    v_exit jsonb;
    v_completed int[] := '{}';
    v_keys bigint[] := '{}';
    v_locked bigint[] := '{}';
    v_parked int := 0;
    v_again int := 0;
    v_skipped int := 0;
    v_unacceptable int := 0;
    v_more bool := false;
    v_seen int := 0;
    v_ord int := 0;
    v_left int := coalesce(c_max, 0);
    v_passed bigint[] := '{}';
    v_handles bigint[];
    v_kinds smallint[];
    v_lanes int[];
    v_bytes int[];
    v_loaded bigint := 0;
    v_cut int;
    v_plain bigint[];
    v_bulk int[];
    v_tickets bigint[];
    v_page int := coalesce(k_page, least(c_max + w_extra, 1024));
    v_from int;
    v_count int;
    v_window int;
    v_starts int;
    v_simple bool;
    -- Single keys, each with the stamp under which a job was parked on it in this call, and how it was refused. Whoever
    -- comes after it under the same stamp stands behind it.
    v_full text[] := '{}';
    v_refusals jsonb := '{}';
    -- Where in `k_…` it stands what the host has said of a job. (To search the array for each candidate would cost its square.)
    v_places jsonb := '{}';
    v_spots int[];
    v_at int;
    v_position int;
    v_admitted record;
    v_job record;
    v_reserved bool;
    v_has_started bool;
    v_stop bool := false;
    v_announce int[] := '{}';
    v_next bigint;
    v_reserved_left bigint[];
    v_counts int[];
    v_woken_for bigint;
    v_looks bigint[] := '{}';
    -- Local waiters: the place of the candidate's key among the wanted, single keys with the stamp under which fresh
    -- candidates wait inside the host (as `v_full` those that are parked), and who does so in the part at hand.
    v_wanted int;
    v_inside text[] := '{}';
    v_wait_job bigint[];
    v_wait_stamp int[];
    v_wait_key bigint[];
    v_wait_digest int[];
    v_wait_known bool;
    v_candidate record;
    v_peeked bool := false;
    v_stranded bigint[];
    v_oldest bigint;
    v_has_unique bool;
    v_has_result bool;
    v_has_cancels bool;
    v_is_paused bool;
    v_has_pauses bool;
    -- Nothing was done that could reserve or wake a job, or make one wait.
    v_is_plain bool := true;
    v_lane int;
    v_due bigint;
    v_first bigint;
    v_is_deep bool;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('warp.host'), p_host);
    IF NOT EXISTS (SELECT FROM warp.host h WHERE h.id = p_host) THEN
        RAISE EXCEPTION 'host % is not registered any more', p_host USING ERRCODE = 'WH001';
    END IF;

    IF p_session IS NOT NULL THEN
        -- What a host owes to the rows rides in its exchanges: first whom its lock session refused (A4).
        v_counts := warp.session_park(p_host, p_session -> 'parks', v_now);
        v_parked := v_counts[1];
        v_again := v_counts[2];
        v_skipped := v_counts[3];
    END IF;
    -- For `warp.hand_on`, until the end of the transaction.
    PERFORM set_config('warp.woken', k_reserved::text, true) WHERE cardinality(k_reserved) > 0;

    -- Before the ends, so that the end of a run whose slot has passed on finds none to free. Index: slot_job.
    IF cardinality(n_key) > 0 THEN
        RETURN QUERY
        WITH passed AS (
            UPDATE warp.slot s SET job = u.to_job, token = u.to_token, since = v_now
              FROM unnest(n_key, n_from, n_from_token, n_to, n_to_token) u (key, from_job, from_token, to_job, to_token)
             WHERE s.job = u.from_job AND s.key = u.key AND s.token = u.from_token AND s.host = p_host
               AND EXISTS (SELECT FROM warp.running r WHERE r.host = p_host AND r.handle = u.to_job AND r.token = u.to_token)
            RETURNING s.job
        )
        -- A repeat finds it where it has gone already, or its last holder ended.
        SELECT 7::smallint, NULL::int, r.handle, NULL::uuid, r.token, NULL::int, NULL::int, NULL::int, NULL::int, NULL::bool, NULL::bigint, NULL::bigint,
               NULL::text, NULL::text, NULL::text, NULL::int, NULL::bigint
          FROM unnest(n_to, n_to_token) u (job, token)
          JOIN warp.running r ON r.host = p_host AND r.handle = u.job AND r.token = u.token
         WHERE NOT EXISTS (SELECT FROM passed p WHERE p.job = u.job)
           AND NOT EXISTS (SELECT FROM warp.slot s WHERE s.job = u.job AND s.token = u.token);
        -- Its last holder is no run of this host any more: it comes free with the end that it was to pass on from.
        SELECT coalesce(array_agg(s.job), '{}'), coalesce(array_agg(s.key), '{}') INTO v_stranded, v_keys
          FROM unnest(n_key, n_from, n_from_token) u (key, job, token) JOIN warp.slot s ON s.job = u.job AND s.key = u.key AND s.token = u.token AND s.host = p_host;
    END IF;

    -- Ends, first those that touch no key's line and nothing that is shared: one statement for all.
    IF cardinality(s_job) > 0 THEN
        -- Each end looks its run up, and the row that was found is deleted by its place. A plain join could be planned the
        -- other way round while `running` is empty, and the plan is kept: then every run of the host is compared with every
        -- end (162 ms instead of 1 ms for 400 ends beside 1,400 runs). Rows of `running` are never updated, so none moves.
        WITH found AS MATERIALIZED (
            SELECT u.ord, u.took, u.result, r.place_in_table
              FROM unnest(s_ord, s_job, s_token, s_took, s_result, s_passed) u (ord, job, token, took, result, has_passed)
             CROSS JOIN LATERAL (SELECT r.ctid AS place_in_table FROM warp.running r
                                  WHERE r.host = p_host AND r.handle = u.job AND r.token = u.token AND (r.keys IS NULL OR u.has_passed) OFFSET 0) r
        ), gone AS (
            DELETE FROM warp.running r USING found u WHERE r.ctid = u.place_in_table
            RETURNING r.handle, r.due, r.lane, r.run, r.attempt, r.deaths, r.is_unique, r.bytes, r.stamp, r.digest, r.claimed_at, r.token, r.keys,
                      u.ord, u.took, u.result
        ), ended AS (
            INSERT INTO warp.ended (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, stamp, digest, host, claimed_at, took_us, settled, keys)
            SELECT g.handle, g.due, v_now, g.lane, g.run, g.attempt, g.deaths, 10, false, g.bytes, g.stamp, g.digest, p_host, g.claimed_at, g.took, g.token, g.keys FROM gone g
        )
        SELECT array_agg(g.ord), bool_or(g.is_unique), bool_or(g.result IS NOT NULL) INTO v_done, v_has_unique, v_has_result FROM gone g;
        IF v_done IS NOT NULL THEN
            INSERT INTO warp.counter (name, value) VALUES ('stats:succeeded', cardinality(v_done)), ('kept:completed', cardinality(v_done));
            IF v_has_unique THEN
                DELETE FROM warp.unique_key k WHERE k.job = ANY (array(
                    SELECT u.job FROM unnest(s_ord, s_job) u (ord, job) WHERE u.ord = ANY (v_done)));
            END IF;
            IF v_has_result THEN
                INSERT INTO warp.outcome (job, result)
                SELECT u.job, u.result FROM unnest(s_ord, s_job, s_result) u (ord, job, result) WHERE u.result IS NOT NULL AND u.ord = ANY (v_done)
                ON CONFLICT (job) DO UPDATE SET result = excluded.result;
            END IF;
            IF cardinality(l_ord) > 0 THEN
                INSERT INTO warp.log (job, at, run, stream, body)
                SELECT e.handle, l.at, e.run, l.stream, l.body
                  FROM unnest(l_ord, l_job, l_at, l_stream, l_body) WITH ORDINALITY l (ord, job, at, stream, body, n)
                  JOIN warp.ended e ON e.handle = l.job
                 WHERE l.ord = ANY (v_done) ORDER BY l.n;
            END IF;
        END IF;
    END IF;

    -- The others one by one, in the order of the batch: with keys, with another end, with children or shared state.
    IF cardinality(s_job) > coalesce(cardinality(v_done), 0) OR s_other IS NOT NULL THEN
        -- All shared state that the batch writes, in one order. Locked end by end, two batches could wait for each other.
        PERFORM pg_advisory_xact_lock(n.name) FROM (
            SELECT DISTINCT warp.state_lock(w ->> 'bucket', w ->> 'key') AS name
              FROM jsonb_array_elements(s_other) o CROSS JOIN LATERAL jsonb_array_elements(o -> 'state') w ORDER BY 1) n;
        FOR v_end IN
            SELECT u.ord, u.job, u.token, u.took, jsonb_build_object('to', 'completed', 'result', u.result) AS exit, NULL::jsonb AS other
              FROM unnest(s_ord, s_job, s_token, s_took, s_result) u (ord, job, token, took, result)
             WHERE v_done IS NULL OR u.ord <> ALL (v_done)
            UNION ALL
            SELECT (o ->> 'ord')::int, (o ->> 'job')::bigint, (o ->> 'token')::bigint, (o ->> 'took')::bigint, o -> 'exit', o
              FROM jsonb_array_elements(s_other) o
             ORDER BY 1
        LOOP
            DELETE FROM warp.running r WHERE r.host = p_host AND r.handle = v_end.job AND r.token = v_end.token RETURNING * INTO v_row;
            IF NOT FOUND THEN
                kind := 1;
                ord := v_end.ord;
                run := CASE WHEN warp.is_settled(v_end.job, v_end.token)
                                 OR EXISTS (SELECT FROM unnest(v_rows) r WHERE r.handle = v_end.job AND r.settled = v_end.token) THEN 1 ELSE 2 END;
                RETURN NEXT;
                CONTINUE;
            END IF;
            v_exit := v_end.exit;
            IF v_exit ->> 'to' = 'completed' THEN
                IF v_end.other ? 'state' AND NOT warp.apply_state(v_end.other -> 'state') THEN
                    v_exit := v_end.other -> 'on_conflict';
                    kind := 1;
                    ord := v_end.ord;
                    run := 3;
                    RETURN NEXT;
                ELSE
                    v_completed := v_completed || v_end.ord;
                END IF;
            END IF;
            INSERT INTO warp.log (job, at, run, stream, body)
            SELECT v_row.handle, l.at, v_row.run, l.stream, l.body
              FROM unnest(l_ord, l_at, l_stream, l_body) WITH ORDINALITY l (ord, at, stream, body, n) WHERE l.ord = v_end.ord ORDER BY l.n;
            IF v_end.other IS NOT NULL THEN
                PERFORM warp.keep_output(v_row.handle, v_end.other);
            END IF;
            v_row.settled := v_end.token;
            IF v_exit ->> 'to' = 'not-begun' THEN
                v_row := warp.unclaimed(v_row);
            END IF;
            IF EXISTS (SELECT FROM warp.cancel_request c WHERE c.job = v_row.handle) THEN
                -- Somebody asked for its end: it does not run again.
                IF v_exit ->> 'to' IN ('retry', 'snooze', 'hand-back', 'not-begun', 'deleted') THEN
                    SELECT jsonb_build_object('to', 'cancelled', 'by', c.asked_by) INTO v_exit
                      FROM warp.cancel_request c WHERE c.job = v_row.handle AND c.token = v_end.token;
                    v_exit := coalesce(v_exit, v_end.exit);
                END IF;
                DELETE FROM warp.cancel_request c WHERE c.job = v_row.handle;
            END IF;
            IF v_exit ->> 'to' = 'hand-back' OR v_exit ->> 'to' = 'not-begun' AND v_row.place = 1 OR v_exit ->> 'to' IN ('retry', 'snooze') AND (v_exit ->> 'at')::bigint <= v_now THEN
                v_announce := v_announce || v_row.lane;
            END IF;
            v_rows := v_rows || v_row;
            v_exits := v_exits || v_exit;
            v_took := v_took || v_end.took;
            v_keys := v_keys || v_row.keys;
        END LOOP;
        -- Before any key row is locked: a unique key may have to be waited for.
        IF cardinality(h_ord) > 0 AND cardinality(v_completed) > 0 THEN
            PERFORM warp.enqueue_apart(array_agg(c.id), array_agg(c.lane), array_agg(c.explicit), array_agg(c.payload), array_agg(c.metadata),
                                       array_agg(c.trace), array_agg(c.due), array_agg(c.unique_key), v_now)
               FROM (SELECT DISTINCT ON (h.id) h.* FROM unnest(h_ord, h_id, h_lane, h_payload, h_metadata, h_trace, h_due, h_explicit, h_unique)
                            h (ord, id, lane, payload, metadata, trace, due, explicit, unique_key)
                      WHERE h.ord = ANY (v_completed) ORDER BY h.id) c
             HAVING count(*) > 0;
        END IF;
    END IF;

    -- What is nearly never there, in one look. Its snapshot begins after the ends: a cancellation that was not seen here
    -- finds the run gone.
    SELECT EXISTS (SELECT FROM warp.cancel_request), h.paused_at IS NOT NULL, EXISTS (SELECT FROM warp.queue_pause),
           (SELECT min(w.due) FROM warp.waiting w WHERE w.place = 0)
      INTO v_has_cancels, v_is_paused, v_has_pauses, v_next FROM warp.host h WHERE h.id = p_host;
    IF v_has_cancels AND v_done IS NOT NULL THEN
        DELETE FROM warp.cancel_request c WHERE c.job = ANY (s_job) AND c.token = ANY (s_token);
    END IF;
    IF v_left > 0 OR w_extra > 0 THEN
        IF v_is_paused THEN
            c_lane := '{}';
        ELSIF v_has_pauses THEN
            -- No lane has the number 0.
            SELECT array_agg(CASE WHEN q.queue IS NULL THEN l.lane ELSE 0 END ORDER BY l.at) INTO c_lane
              FROM unnest(c_lane) WITH ORDINALITY l (lane, at)
              LEFT JOIN warp.lane n ON n.id = l.lane LEFT JOIN warp.queue_pause q ON q.queue = n.queue;
        END IF;
        IF v_next <= v_now THEN
            v_more := warp.activate(v_now) >= 1000;
            v_is_plain := false;
        END IF;
        IF true = ANY (c_keyed) OR cardinality(k_job) > 0 THEN
            -- The keys of the candidates in sight, so that they are locked in order with those of the ends.
            SELECT v_keys || coalesce(array_agg(k), '{}') INTO v_keys
              FROM (SELECT unnest(c.keys) FROM unnest(c_lane) l (lane) CROSS JOIN LATERAL (
                        SELECT r.keys FROM warp.ready r WHERE r.lane = l.lane AND r.place = 3 ORDER BY r.due, r.handle LIMIT c_max) c
                    UNION ALL
                    SELECT unnest(c.keys) FROM unnest(c_lane) l (lane) CROSS JOIN LATERAL (
                        SELECT r.keys FROM warp.ready r WHERE r.lane = l.lane AND r.place = 1 ORDER BY r.due, r.handle LIMIT c_max) c
                    UNION ALL
                    SELECT unnest(k.keys::bigint[]) FROM unnest(k_keys) k (keys)) k (k);
        END IF;
        v_keys := v_keys || w_key;
    END IF;
    -- Under session locks no key row is locked: the lock session admits, after this.
    IF cardinality(v_keys) > 0 AND p_session IS NULL THEN
        v_locked := v_keys;
        PERFORM warp.lock_keys(v_locked);
    END IF;
    FOR v_at IN 1 .. cardinality(v_rows) LOOP
        PERFORM warp.leave(v_rows[v_at], v_exits[v_at], v_took[v_at], v_now);
    END LOOP;
    IF cardinality(v_stranded) > 0 THEN
        v_is_plain := false;
        WITH freed AS (
            DELETE FROM warp.slot s WHERE s.job = ANY (v_stranded) AND s.host = p_host AND NOT EXISTS (SELECT FROM warp.running r WHERE r.host = p_host AND r.handle = s.job)
            RETURNING s.key
        )
        SELECT array_agg(DISTINCT f.key) INTO v_stranded FROM freed f;
        PERFORM warp.hand_on_all(v_stranded, v_now) WHERE v_stranded IS NOT NULL;
    END IF;
    IF p_session IS NOT NULL THEN
        -- For locks given back before this statement began (A5), counted after these ends (A8); and for parks committed before.
        PERFORM warp.session_wakes(p_session -> 'wakes', v_now);
        PERFORM warp.session_look(array(SELECT (k #>> '{}')::bigint FROM jsonb_array_elements(p_session -> 'looks') k), v_now)
          WHERE jsonb_array_length(p_session -> 'looks') > 0;
    END IF;

    -- B8: of keys whose slots the host holds, those in line who are older than everything that is ready. Else a claim would
    -- park what is new behind them, a page at a time, for want of what it could have had here.
    IF v_left + w_extra > 0 AND cardinality(w_key) > 0 THEN
        v_is_plain := false;
        SELECT min(r.due) INTO v_oldest
          FROM unnest(c_lane) l (lane)
         CROSS JOIN LATERAL ((SELECT r.due FROM warp.ready r WHERE r.lane = l.lane AND r.place = 1 ORDER BY r.due, r.handle LIMIT 1)
                             UNION ALL
                             (SELECT r.due FROM warp.ready r WHERE r.lane = l.lane AND r.place = 3 ORDER BY r.due, r.handle LIMIT 1)) r;
        FOR v_at IN 1 .. coalesce(cardinality(w_key), 0) LOOP
            CONTINUE WHEN least(w_most[v_at], v_left + w_extra) <= 0;
            RETURN QUERY
            SELECT 2::smallint, v_ord, t.handle, j.id, t.token, t.run, t.attempt, t.lane, t.stamp, true, j.created_at, t.due, j.payload, j.metadata, j.trace_parent, 1, w_key[v_at]
              FROM warp.take_waiters(w_key[v_at], least(w_most[v_at], v_left + w_extra), p_host, c_lane, c_digest, v_oldest, v_now) t
              JOIN warp.job j ON j.handle = t.handle;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_left := v_left - greatest(v_count - w_extra, 0);
            w_extra := greatest(w_extra - v_count, 0);
            w_most[v_at] := w_most[v_at] - v_count;
        END LOOP;
    END IF;

    IF v_left > 0 THEN
        -- Which lanes hold anything, and whether it may simply start. What was claimed stays in the index until that is
        -- vacuumed, and whoever begins at the front of a long backlog walks over all of it; hence `c_from_…`.
        SELECT count(*), min(l.at), min(l.lane), min(h.due), min(h.handle), bool_or(l.from_due IS NOT NULL),
               bool_or(l.keyed OR h.due IS NULL OR p.has_reserved OR p.has_special)
          INTO v_count, v_at, v_lane, v_due, v_first, v_is_deep, v_stop
          FROM unnest(c_lane, c_keyed, c_from_due, c_from_job) WITH ORDINALITY l (lane, keyed, from_due, from_job, at)
          LEFT JOIN LATERAL (SELECT r.due, r.handle FROM warp.ready r
                              WHERE r.lane = l.lane AND r.place = 1 AND (r.due, r.handle) > (coalesce(l.from_due, -9223372036854775808), coalesce(l.from_job, 0))
                              ORDER BY r.due, r.handle LIMIT 1) h ON true
         CROSS JOIN LATERAL (
               SELECT EXISTS (SELECT FROM warp.ready r WHERE r.lane = l.lane AND r.place = 3) AS has_reserved,
                      EXISTS (SELECT FROM warp.ready r WHERE r.lane = l.lane AND r.place = 1
                                 AND (r.explicit IS NOT NULL OR r.keys IS NOT NULL OR r.bytes IS NOT NULL)) AS has_special OFFSET 0) p
         WHERE h.due IS NOT NULL OR p.has_reserved OR l.from_due IS NOT NULL;
        IF v_count = 1 AND NOT v_stop AND coalesce(cardinality(k_job), 0) = 0 THEN
            -- One lane, and nothing in it needs a key or declared anything or is large: one statement from the index to
            -- `running`. Rows are locked in their order, those of others are passed over, and what was locked is deleted by its
            -- place. Who has been changed since the snapshot has another place and stays for the next call.
            RETURN QUERY
            WITH page AS (
                SELECT r.ctid AS place_in_table FROM warp.ready r
                 WHERE r.lane = v_lane AND r.place = 1 AND (r.due, r.handle) >= (v_due, v_first) AND r.explicit IS NULL AND r.keys IS NULL AND r.bytes IS NULL
                   -- In a deep backlog other calls are at work in front: to find a row locked costs more than to see that
                   -- somebody has touched it. (What an aborted transaction touched waits for a look at all.)
                   AND (NOT v_is_deep OR r.xmax = '0')
                 ORDER BY r.due, r.handle LIMIT least(v_left, 4096) FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM warp.ready r USING page p WHERE r.ctid = p.place_in_table
                RETURNING r.handle, r.due, r.run, r.attempt, r.deaths, r.is_unique, r.stamp, r.settled, r.ticket
            ), started AS (
                INSERT INTO warp.running AS s (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, stamp, digest, host, claimed_at, token, settled, ticket)
                SELECT g.handle, g.due, v_now, v_lane, g.run + 1, g.attempt + 1, g.deaths, 4, g.is_unique, coalesce(g.stamp, c_stamp[v_at]), c_digest[v_at],
                       p_host, v_now, nextval('warp.token'), g.settled, g.ticket
                  FROM gone g
                RETURNING s.handle, s.token, s.run, s.attempt, s.stamp, s.due
            )
            SELECT 2::smallint, 0, s.handle, j.id, s.token, s.run, s.attempt, v_lane, s.stamp, false, j.created_at, s.due, j.payload, j.metadata, j.trace_parent, NULL::int, NULL::bigint
              FROM started s JOIN warp.job j ON j.handle = s.handle;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_left := v_left - v_count;
            -- Less than a deep lane was thought to hold: from the front, then, as a whole.
            v_stop := NOT (v_is_deep AND v_left > 0);
            v_more := v_more OR v_count = 4096;
        ELSE
            v_stop := v_count = 0;
        END IF;
        v_is_plain := v_is_plain AND v_stop;
    END IF;

    -- Claims, page by page: what is reserved for these lanes first, then what is ready, oldest due first. The first page is
    -- as long as what is wanted; later ones are longer, because candidates that park cost little. A page is decided in its
    -- order, part by part, until enough have started; what was parked has left the index by the next page, and what was
    -- woken is in it.
    IF cardinality(k_job) > 0 THEN
        SELECT jsonb_object_agg(k.job, k.n) INTO v_places FROM unnest(k_job) WITH ORDINALITY k (job, n);
    END IF;
    WHILE v_left > 0 AND NOT v_stop LOOP
        SELECT array_agg(q.handle ORDER BY q.due, q.handle), array_agg(3::smallint), array_agg(q.bytes ORDER BY q.due, q.handle),
               array_agg(q.at ORDER BY q.due, q.handle), '{}'::int[]
          INTO v_handles, v_kinds, v_bytes, v_lanes, v_spots
          FROM (SELECT r.handle, r.due, l.at, r.bytes
                  FROM unnest(c_lane) WITH ORDINALITY l (lane, at)
                 CROSS JOIN LATERAL (SELECT i.handle FROM warp.ready i WHERE i.lane = l.lane AND i.place = 3
                                        AND i.handle <> ALL (v_passed) ORDER BY i.due, i.handle LIMIT v_page) c
                  JOIN warp.ready r ON r.handle = c.handle
                 ORDER BY r.due, r.handle LIMIT v_page FOR UPDATE OF r SKIP LOCKED) q;
        v_reserved := v_handles IS NOT NULL;
        v_simple := false;
        IF NOT v_reserved THEN
            -- Others may hold the rows in front, so the look goes further than the page is long.
            v_window := 4 * v_page + 64;
            -- 0 starts at once, 1 has keys, 2 needs stamp and keys, 3 cannot be applied, 4 starts with the stamp brought. What the
            -- host has said counts only where no other host has written stamp and keys since it looked.
            SELECT array_agg(q.handle ORDER BY q.due, q.handle), array_agg(q.kind ORDER BY q.due, q.handle),
                   array_agg(q.bytes ORDER BY q.due, q.handle), array_agg(q.at ORDER BY q.due, q.handle), array_agg(q.spot ORDER BY q.due, q.handle),
                   bool_and(q.kind = 0 AND q.bytes IS NULL) AND count(*) <= v_left
              INTO v_handles, v_kinds, v_bytes, v_lanes, v_spots, v_simple
              FROM (SELECT r.handle, r.due, c.at, r.bytes, CASE WHEN r.stamp IS NULL OR r.keys = '{}' THEN p.spot END AS spot,
                           (CASE WHEN r.stamp IS NOT NULL AND r.keys IS DISTINCT FROM '{}' THEN CASE WHEN r.keys IS NULL THEN 0 ELSE 1 END
                                 WHEN p.spot IS NOT NULL THEN
                                     CASE WHEN k_error[p.spot] IS NOT NULL THEN 3 WHEN k_keys[p.spot] IS NOT NULL THEN 1 ELSE 4 END
                                 WHEN r.explicit IS NOT NULL OR c.keyed OR r.keys IS NOT NULL THEN 2 ELSE 0 END)::smallint AS kind
                      FROM (SELECT i.handle, i.due, l.at, l.keyed
                              FROM unnest(c_lane, c_keyed) WITH ORDINALITY l (lane, keyed, at)
                             CROSS JOIN LATERAL (SELECT i.handle, i.due FROM warp.ready i WHERE i.lane = l.lane AND i.place = 1
                                                    AND i.handle <> ALL (v_passed) ORDER BY i.due, i.handle LIMIT v_window) i
                             ORDER BY i.due, i.handle LIMIT v_window) c
                      JOIN warp.ready r ON r.handle = c.handle
                     CROSS JOIN LATERAL (SELECT (v_places ->> r.handle::text)::int AS spot) p
                     ORDER BY c.due, c.handle LIMIT v_page FOR UPDATE OF r SKIP LOCKED) q;
        END IF;
        EXIT WHEN v_handles IS NULL;
        v_seen := v_seen + cardinality(v_handles);
        v_count := cardinality(v_handles);
        IF NOT v_reserved AND 2::smallint = ANY (v_kinds) THEN
            -- Nothing of the page is decided before the whole of it can be, in its order. An unlocked look at those which
            -- need stamp and keys: a page of them at least, and of each call more than of the one before, so that long
            -- lines of jobs that will have to wait are parked many at a time.
            v_window := greatest(v_page, 256, least(4 * cardinality(k_job), 2048));
            v_peeked := true;
            RETURN QUERY
            SELECT 3::smallint, 0, j.handle, j.id, NULL::bigint, NULL::int, NULL::int, j.lane, c.stamp, NULL::bool, j.created_at, c.due, j.payload, NULL::text, NULL::text, j.explicit,
                   NULL::bigint
              FROM (SELECT i.handle, i.due, i.stamp, sum(coalesce(i.bytes, 0)) OVER (ORDER BY i.due, i.handle) - coalesce(i.bytes, 0) AS before
                      FROM (SELECT i.* FROM unnest(c_lane, c_keyed) l (lane, keyed)
                             CROSS JOIN LATERAL (SELECT i.handle, i.due, i.bytes, i.stamp FROM warp.ready i
                                                  WHERE i.lane = l.lane AND i.place = 1
                                                   AND (i.stamp IS NULL AND (l.keyed OR i.explicit IS NOT NULL) OR i.keys = '{}')
                                                  ORDER BY i.due, i.handle LIMIT v_window) i
                             ORDER BY i.due, i.handle LIMIT v_window) i) c
              JOIN warp.job j ON j.handle = c.handle
             WHERE c.before < 16777216;
            EXIT;
        END IF;

        v_from := 1;
        WHILE v_from <= v_count AND v_left > 0 AND NOT v_stop LOOP
            -- How far the next part of the page goes: to what may start, and to the bytes of large payloads that one answer may
            -- bring (one in any case).
            v_cut := v_count;
            v_plain := CASE WHEN v_simple THEN v_handles ELSE '{}' END;
            v_starts := 0;
            FOR v_at IN v_from .. CASE WHEN v_simple THEN 0 ELSE v_count END LOOP
                IF v_starts = v_left THEN
                    v_cut := v_at - 1;
                    EXIT;
                END IF;
                v_position := CASE WHEN v_kinds[v_at] = 1 AND cardinality(v_full) > 0 THEN v_spots[v_at] END;
                v_starts := v_starts + CASE WHEN v_kinds[v_at] = 3 AND NOT v_reserved THEN 0
                                            WHEN v_position IS NOT NULL AND k_keys[v_position] || '/' || k_stamp[v_position] = ANY (v_full) THEN 0
                                            ELSE 1 END;
                IF v_bytes[v_at] IS NOT NULL THEN
                    IF v_loaded > 0 AND v_loaded + v_bytes[v_at] > 16777216 THEN
                        v_cut := v_at - 1;
                        v_more := true;
                        v_stop := true;
                        EXIT;
                    END IF;
                    v_loaded := v_loaded + v_bytes[v_at];
                END IF;
                IF v_kinds[v_at] IN (0, 4) THEN
                    v_plain := v_plain || v_handles[v_at];
                END IF;
            END LOOP;
            IF cardinality(v_plain) > 0 THEN
                v_left := v_left - cardinality(v_plain);
                -- Without a key: one statement for all. The inserted row tells what the host must know, so nothing is joined
                -- but the job by its key.
                RETURN QUERY
                WITH gone AS (
                    DELETE FROM warp.ready r
                     USING unnest(v_handles, v_kinds, v_lanes, v_spots) WITH ORDINALITY u (handle, kind, at, spot, n)
                     WHERE u.kind IN (0, 4) AND u.n BETWEEN v_from AND v_cut AND r.handle = u.handle
                    RETURNING r.*, coalesce(r.stamp, CASE u.kind WHEN 4 THEN k_stamp[u.spot] END, c_stamp[u.at]) AS new_stamp, c_digest[u.at] AS new_digest
                ), started AS (
                    INSERT INTO warp.running AS s (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, stamp, digest, host, claimed_at, token, settled, ticket)
                    SELECT g.handle, g.due, v_now, g.lane, g.run + 1, g.attempt + 1, g.deaths, 4, g.is_unique, g.bytes, g.new_stamp, g.new_digest, p_host, v_now, nextval('warp.token'), g.settled, g.ticket
                      FROM gone g
                    RETURNING s.handle, s.token, s.run, s.attempt, s.lane, s.stamp, s.due
                )
                SELECT 2::smallint, v_ord, s.handle, j.id, s.token, s.run, s.attempt, s.lane, s.stamp, false, j.created_at, s.due, j.payload, j.metadata, j.trace_parent, NULL::int,
                       NULL::bigint
                  FROM started s JOIN warp.job j ON j.handle = s.handle;
            END IF;

            IF cardinality(v_plain) < v_cut - v_from + 1 THEN
                v_bulk := '{}';
                v_tickets := '{}';
                v_wait_job := '{}';
                v_wait_stamp := '{}';
                v_wait_key := '{}';
                v_wait_digest := '{}';
                v_wait_known := true;
                FOR v_at IN v_from .. v_cut LOOP
                    CONTINUE WHEN v_kinds[v_at] IN (0, 4);
                    v_position := v_spots[v_at];
                    IF v_kinds[v_at] = 3 AND NOT v_reserved THEN
                        DELETE FROM warp.ready r WHERE r.handle = v_handles[v_at] RETURNING * INTO v_row;
                        v_row.stamp := k_stamp[v_position];
                        -- Should it ever come back, it needs its keys rendered still.
                        v_row.keys := CASE WHEN v_row.stamp IS NOT NULL THEN '{}'::bigint[] END;
                        v_unacceptable := v_unacceptable + 1;
                        PERFORM warp.leave(v_row, jsonb_build_object('to', 'failed', 'message', k_error[v_position], 'reason', 'unacceptable'), NULL, v_now);
                        CONTINUE;
                    END IF;
                    IF v_position IS NOT NULL AND k_keys[v_position] || '/' || k_stamp[v_position] = ANY (v_full) THEN
                        v_bulk := v_bulk || v_position;
                        v_tickets := v_tickets || nextval('warp.ticket');
                        CONTINUE;
                    END IF;
                    IF v_position IS NOT NULL THEN
                        v_keys := k_keys[v_position]::bigint[];
                    ELSE
                        SELECT r.keys INTO v_keys FROM warp.ready r WHERE r.handle = v_handles[v_at];
                    END IF;
                    v_wanted := CASE WHEN NOT v_reserved AND cardinality(v_keys) = 1 THEN array_position(w_key, v_keys[1]) END;
                    IF w_most[v_wanted] > 0 AND k_keys[v_position] || '/' || k_stamp[v_position] = ANY (v_inside) THEN
                        v_wait_job := v_wait_job || v_handles[v_at];
                        v_wait_stamp := v_wait_stamp || k_stamp[v_position];
                        v_wait_key := v_wait_key || v_keys[1];
                        v_wait_digest := v_wait_digest || c_digest[v_lanes[v_at]];
                        w_most[v_wanted] := w_most[v_wanted] - 1;
                        v_left := v_left - CASE WHEN w_extra > 0 THEN 0 ELSE 1 END;
                        w_extra := greatest(w_extra - 1, 0);
                        CONTINUE;
                    END IF;
                    IF p_session IS NULL AND NOT v_keys <@ v_locked THEN
                        IF (SELECT count(*) FROM (SELECT FROM warp.conc_key c WHERE c.id = ANY (v_keys) ORDER BY c.id FOR UPDATE SKIP LOCKED) c) < cardinality(v_keys) THEN
                            v_passed := v_passed || v_handles[v_at];
                            v_more := true;
                            CONTINUE;
                        END IF;
                        v_locked := v_locked || v_keys;
                    END IF;
                    -- Whether it starts depends on who stands in line by now, and it may hand keys on to them.
                    PERFORM warp.park_behind(v_bulk, v_tickets, k_job, k_stamp, k_keys, v_refusals, v_now);
                    v_parked := v_parked + cardinality(v_bulk);
                    v_bulk := '{}';
                    v_tickets := '{}';
                    IF w_most[v_wanted] > 0 THEN
                        SELECT c.ticket, c.stamp INTO v_candidate
                          FROM (SELECT r.ticket, r.stamp AS stamped, coalesce(k_stamp[v_position], r.stamp) AS stamp FROM warp.ready r WHERE r.handle = v_handles[v_at]) c
                          JOIN warp.policy p ON p.id = c.stamp AND p.weight = 1 AND NOT p.is_fifo AND NOT (p.skips AND c.stamped IS NULL)
                         WHERE warp.passes_inside(v_keys[1], p_host) = greatest(p.slots, 1)
                           AND (SELECT f.why FROM warp.refusal(v_keys[1], c.ticket, p.slots, 1) f) = 5;
                        IF FOUND THEN
                            v_wait_job := v_wait_job || v_handles[v_at];
                            v_wait_stamp := v_wait_stamp || v_candidate.stamp;
                            v_wait_key := v_wait_key || v_keys[1];
                            v_wait_digest := v_wait_digest || c_digest[v_lanes[v_at]];
                            v_wait_known := v_wait_known AND v_position IS NOT NULL;
                            w_most[v_wanted] := w_most[v_wanted] - 1;
                            v_left := v_left - CASE WHEN w_extra > 0 THEN 0 ELSE 1 END;
                            w_extra := greatest(w_extra - 1, 0);
                            -- Of those who come after it under the same stamp, with no place in line either, the same is true.
                            IF v_position IS NOT NULL AND v_candidate.ticket IS NULL THEN
                                v_inside := v_inside || (k_keys[v_position] || '/' || k_stamp[v_position]);
                            END IF;
                            CONTINUE;
                        END IF;
                    END IF;
                    v_inside := '{}';
                    DELETE FROM warp.ready r WHERE r.handle = v_handles[v_at] RETURNING * INTO v_row;
                    v_has_started := v_row.stamp IS NOT NULL;
                    IF v_position IS NOT NULL THEN
                        v_row.stamp := k_stamp[v_position];
                        v_row.keys := v_keys;
                    END IF;
                    IF v_reserved OR v_row.parked_on IS NOT NULL OR v_row.ticket IS NOT NULL OR cardinality(v_keys) > 1 THEN
                        -- It may give a key back; what was full need not be any more.
                        v_full := '{}';
                    END IF;
                    v_woken_for := v_row.parked_on;
                    IF p_session IS NULL THEN
                        SELECT * INTO v_admitted FROM warp.admit(v_row, v_has_started, p_host, c_digest[v_lanes[v_at]], v_now);
                    ELSE
                        SELECT * INTO v_admitted FROM warp.session_admit(v_row, v_has_started, p_host, c_digest[v_lanes[v_at]], v_now, p_session -> 'room');
                    END IF;
                    CASE v_admitted.verdict
                    WHEN 1 THEN
                        v_row := v_admitted.p_row;
                        v_left := v_left - 1;
                        RETURN QUERY SELECT 2::smallint, v_ord, j.handle, j.id, v_row.token, v_row.run, v_row.attempt, v_row.lane, v_row.stamp, true,
                               j.created_at, v_row.due, CASE WHEN v_position IS NULL THEN j.payload END, j.metadata, j.trace_parent, NULL::int,
                               (SELECT v_keys[1] FROM warp.policy p
                                 WHERE p.id = v_row.stamp AND p_session IS NULL AND cardinality(v_keys) = 1 AND p.weight = 1 AND NOT p.is_fifo)
                          FROM warp.job j WHERE j.handle = v_row.handle;
                        IF p_session IS NOT NULL THEN
                            kind := 4;
                            ord := v_has_started::int;
                            job := v_row.handle;
                            token := v_woken_for;
                            payload := to_json(v_row.keys)::text;
                            RETURN NEXT;
                        END IF;
                    WHEN 2 THEN
                        v_looks := v_looks || (v_admitted.p_row).parked_on;
                        v_parked := v_parked + 1;
                        v_again := v_again + v_admitted.again::int;
                        IF v_position IS NOT NULL AND cardinality(v_keys) = 1 AND v_admitted.fills THEN
                            v_full := v_full || (k_keys[v_position] || '/' || k_stamp[v_position]);
                            v_refusals := v_refusals || jsonb_build_object(k_keys[v_position] || '/' || k_stamp[v_position], (v_admitted.p_row).refusal);
                        END IF;
                    ELSE
                        v_skipped := v_skipped + 1;
                    END CASE;
                END LOOP;
                IF cardinality(v_bulk) > 0 THEN
                    v_parked := v_parked + cardinality(v_bulk);
                    PERFORM warp.park_behind(v_bulk, v_tickets, k_job, k_stamp, k_keys, v_refusals, v_now);
                END IF;
                IF cardinality(v_wait_job) > 0 THEN
                    -- Runs of this host without a slot (B8). Their tokens grow in the order in which they are to begin.
                    RETURN QUERY
                    WITH gone AS (
                        DELETE FROM warp.ready r
                         USING unnest(v_wait_job, v_wait_stamp, v_wait_key, v_wait_digest) WITH ORDINALITY u (job, stamp, key, digest, n)
                         WHERE r.handle = u.job
                        RETURNING r.*, u.stamp AS new_stamp, u.key, u.digest AS new_digest, u.n
                    ), started AS (
                        INSERT INTO warp.running AS s (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, stamp, digest, host, claimed_at, token, settled, keys, ticket)
                        SELECT g.handle, g.due, v_now, g.lane, g.run + 1, g.attempt + 1, g.deaths, 4, g.is_unique, g.bytes, g.new_stamp, g.new_digest, p_host, v_now,
                               nextval('warp.token'), g.settled, ARRAY[g.key], g.ticket
                          FROM (SELECT * FROM gone ORDER BY gone.n) g
                        RETURNING s.handle, s.token, s.run, s.attempt, s.lane, s.stamp, s.due, s.keys
                    )
                    SELECT 2::smallint, v_ord, s.handle, j.id, s.token, s.run, s.attempt, s.lane, s.stamp, true, j.created_at, s.due,
                           CASE WHEN NOT v_wait_known THEN j.payload END, j.metadata, j.trace_parent, 1, s.keys[1]
                      FROM started s JOIN warp.job j ON j.handle = s.handle;
                END IF;
            END IF;
            v_from := v_cut + 1;
        END LOOP;
        v_ord := v_ord + 1;
        v_page := least(greatest(2 * v_page, 64), 1024);
        IF v_seen >= 4096 THEN
            v_more := true;
            EXIT;
        END IF;
    END LOOP;

    -- B8: the rest of those who may wait inside the host, whoever is older. Not before every candidate in sight has been
    -- decided.
    IF v_left + w_extra > 0 AND NOT v_peeked THEN
        FOR v_at IN 1 .. coalesce(cardinality(w_key), 0) LOOP
            CONTINUE WHEN least(w_most[v_at], v_left + w_extra) <= 0;
            RETURN QUERY
            SELECT 2::smallint, v_ord, t.handle, j.id, t.token, t.run, t.attempt, t.lane, t.stamp, true, j.created_at, t.due, j.payload, j.metadata, j.trace_parent, 1, w_key[v_at]
              FROM warp.take_waiters(w_key[v_at], least(w_most[v_at], v_left + w_extra), p_host, c_lane, c_digest, NULL, v_now) t
              JOIN warp.job j ON j.handle = t.handle;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_left := v_left - greatest(v_count - w_extra, 0);
            w_extra := greatest(w_extra - v_count, 0);
            w_most[v_at] := w_most[v_at] - v_count;
        END LOOP;
    END IF;

    -- What was not even tried has not happened.
    IF NOT v_is_plain OR cardinality(v_rows) > 0 OR p_session IS NOT NULL OR cardinality(k_reserved) > 0 THEN
        SELECT array_agg(r.handle) INTO v_reserved_left FROM warp.ready r
         WHERE r.parked_on IS NOT NULL AND (r.xmin = pg_current_xact_id()::xid OR r.handle = ANY (k_reserved));
        SELECT min(w.due) INTO v_next FROM warp.waiting w WHERE w.place = 0;
    END IF;
    -- Others may be free for what this transaction made runnable and did not claim itself.
    IF v_reserved_left IS NOT NULL THEN
        v_announce := v_announce || array(SELECT DISTINCT r.lane FROM warp.ready r WHERE r.parked_on IS NOT NULL AND r.xmin = pg_current_xact_id()::xid);
    END IF;
    IF cardinality(v_announce) > 0 THEN
        PERFORM warp.announce(v_announce);
    END IF;
    IF p_session IS NOT NULL THEN
        FOR kind, ord, job, token IN
            SELECT 5, c.admin_limit, c.id, c.version FROM warp.conc_key c
             WHERE c.id = ANY (array(SELECT (k #>> '{}')::bigint FROM jsonb_array_elements(p_session -> 'held') k))
            UNION ALL SELECT DISTINCT 6, NULL::int, k, NULL::bigint FROM unnest(v_looks) k
        LOOP
            RETURN NEXT;
        END LOOP;
    END IF;
    kind := 0;
    ord := NULL;
    job := v_next;
    token := v_now;
    payload := jsonb_build_object('parked', v_parked, 'again', v_again, 'skipped', v_skipped, 'unacceptable', v_unacceptable,
                                  'more', v_more, 'reserved', coalesce(v_reserved_left, '{}'), 'page', v_page)::text;
    RETURN NEXT;
END $$;

-- Parks fresh jobs of single keys behind one of the same stamp that was just refused there: `p_at` are their places in the
-- arrays, `p_tickets` their places in line. Their keys are locked.
CREATE OR REPLACE FUNCTION warp.park_behind(p_at int[], p_tickets bigint[], k_job bigint[], k_stamp int[], k_keys text[], p_refusals jsonb, p_now bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_at) = 0 THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM warp.ready r
         USING (SELECT u.ticket, k_job[u.at] AS job, k_stamp[u.at] AS stamp, k_keys[u.at] AS keys, p_refusals ->> (k_keys[u.at] || '/' || k_stamp[u.at]) AS refusal
                  FROM unnest(p_at, p_tickets) u (at, ticket)) u
         WHERE r.handle = u.job
        RETURNING r.handle, r.due, r.lane, r.run, r.attempt, r.deaths, r.is_unique, r.bytes, r.explicit, r.settled, u.ticket, u.stamp AS new_stamp,
                  u.keys::bigint[] AS new_keys, u.refusal AS new_refusal
    ), told AS (
        INSERT INTO warp.audit (job, at, event, run, runs, message)
        SELECT g.handle, p_now, 7, 0, g.run, 'Requeued — ' || g.new_refusal FROM gone g
    )
    INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, explicit, stamp, settled, keys, ticket, parked_on, refusal)
    SELECT g.handle, g.due, p_now, g.lane, g.run, g.attempt, g.deaths, 2, g.is_unique, g.bytes, g.explicit, g.new_stamp, g.settled, g.new_keys,
           g.ticket, g.new_keys[1], g.new_refusal
      FROM gone g;
    PERFORM warp.count('stats:requeued', 'concurrency', cardinality(p_at));
END $$;

-- Whether a settle with this token has been written before (C1). Primary keys; the running rows by host.
CREATE OR REPLACE FUNCTION warp.is_settled(p_job bigint, p_token bigint) RETURNS bool LANGUAGE sql AS $$
    SELECT EXISTS (SELECT FROM warp.ended e WHERE e.handle = p_job AND e.settled = p_token)
        OR EXISTS (SELECT FROM warp.ready r WHERE r.handle = p_job AND r.settled = p_token)
        OR EXISTS (SELECT FROM warp.waiting w WHERE w.handle = p_job AND w.settled = p_token)
        OR EXISTS (SELECT FROM warp.host h JOIN warp.running r ON r.host = h.id WHERE r.handle = p_job AND r.settled = p_token)
$$;

-- Makes due jobs runnable, a bounded number; how many. Index: waiting_due in its order, SKIP LOCKED.
CREATE OR REPLACE FUNCTION warp.activate(p_now bigint) RETURNS bigint LANGUAGE sql AS $$
    WITH due AS (
        DELETE FROM warp.waiting w WHERE w.handle IN (
            SELECT d.handle FROM warp.waiting d WHERE d.place = 0 AND d.due <= p_now ORDER BY d.due LIMIT 1000 FOR UPDATE SKIP LOCKED)
        RETURNING *
    ), told AS (
        INSERT INTO warp.audit (job, at, event, run, runs) SELECT d.handle, p_now, 6, 0, d.run FROM due d
    ), moved AS (
        INSERT INTO warp.ready
        SELECT d.handle, d.due, p_now, d.lane, d.run, d.attempt, d.deaths, 1, d.is_unique, d.bytes, d.explicit, d.stamp, d.digest, d.host,
               d.claimed_at, d.took_us, d.token, d.settled, d.keys, d.ticket, d.parked_on, d.refusal FROM due d
    )
    SELECT count(*) FROM due
$$;

-- Writes a run's shared state, all or nothing: false if a comparison fails or a value is no number. Writers of one value
-- take turns by a lock on its name, which the caller has taken for all that its transaction writes, in one order; the locks
-- end with the transaction. Index: primary key of state.
CREATE OR REPLACE FUNCTION warp.apply_state(p_writes jsonb) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    -- What was written before the one that conflicts is undone with this block.
    BEGIN
        PERFORM warp.write_state(w ->> 'bucket', w ->> 'key', w -> 'change')
           FROM jsonb_array_elements(p_writes) WITH ORDINALITY w (w, n) ORDER BY n;
    EXCEPTION WHEN SQLSTATE 'WH004' THEN
        RETURN false;
    END;
    RETURN true;
END $$;

-- The name of the lock of a value.
CREATE OR REPLACE FUNCTION warp.state_lock(p_bucket text, p_key text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended(format('warp.state:%s:%s:%s', length(p_bucket), p_bucket, p_key), 0)
$$;

-- One change of one value, whose lock is held; the value that is there now. A change is {"put": text or null},
-- {"expected": …, "value": …} or {"add": decimal text}. Raises WH004 where it cannot be made: in its detail the value that
-- is there, in its message `conflict` or `not a number`.
CREATE OR REPLACE FUNCTION warp.write_state(p_bucket text, p_key text, p_change jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_is text;
    v_new text;
BEGIN
    SELECT s.value INTO v_is FROM warp.state s WHERE s.bucket = p_bucket AND s.key = p_key;
    IF p_change ? 'put' THEN
        v_new := p_change ->> 'put';
    ELSIF p_change ? 'add' THEN
        v_new := coalesce(v_is, '0');
        IF v_new !~ '^[+-]?[0-9]+$' OR length(v_new) > 60
           OR v_new::numeric NOT BETWEEN -170141183460469231731687303715884105728 AND 170141183460469231731687303715884105727
           OR v_new::numeric + (p_change ->> 'add')::numeric
              NOT BETWEEN -170141183460469231731687303715884105728 AND 170141183460469231731687303715884105727 THEN
            RAISE EXCEPTION 'not a number' USING ERRCODE = 'WH004', DETAIL = v_new;
        END IF;
        v_new := (v_new::numeric + (p_change ->> 'add')::numeric)::text;
    ELSE
        IF v_is IS DISTINCT FROM p_change ->> 'expected' THEN
            RAISE EXCEPTION 'conflict' USING ERRCODE = 'WH004', DETAIL = coalesce('=' || v_is, '');
        END IF;
        v_new := p_change ->> 'value';
    END IF;
    IF v_new IS NULL THEN
        DELETE FROM warp.state s WHERE s.bucket = p_bucket AND s.key = p_key;
    ELSE
        INSERT INTO warp.state (bucket, key, value) VALUES (p_bucket, p_key, v_new)
        ON CONFLICT (bucket, key) DO UPDATE SET value = excluded.value;
    END IF;
    RETURN v_new;
END $$;

-- Lines and reports besides the log: progress, what caps kept out.
CREATE OR REPLACE FUNCTION warp.keep_output(p_job bigint, p_output jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO warp.progress (job, name, percent)
    SELECT p_job, p ->> 0, (p ->> 1)::real FROM jsonb_array_elements(p_output -> 'progress') WITH ORDINALITY p (p, n) ORDER BY n
    ON CONFLICT (job, name) DO UPDATE SET percent = excluded.percent;
    IF p_output ? 'dropped' THEN
        INSERT INTO warp.outcome (job, dropped_lines, dropped_bytes)
        VALUES (p_job, (p_output -> 'dropped' ->> 0)::bigint, (p_output -> 'dropped' ->> 1)::bigint)
        ON CONFLICT (job) DO UPDATE SET dropped_lines = outcome.dropped_lines + excluded.dropped_lines,
                                        dropped_bytes = outcome.dropped_bytes + excluded.dropped_bytes;
    END IF;
END $$;
