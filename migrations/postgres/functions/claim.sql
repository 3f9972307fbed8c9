-- The claim of a host that has nothing else to tell: what an idle one sends when it is told of a job, and at each poll.
--
-- `warp.exchange` says what a claim does, and this does the same with less work where there is nothing or just one job, and
-- that job may simply start: between an enqueue and the start of its run each microsecond counts, and the exchange has to
-- prepare for a thousand rows. Everything else is passed on to it.
--
-- What must stay true: what is decided here, the exchange would decide in the same way.
--
-- Locks: the host shared, as there; the row that is claimed, with SKIP LOCKED.
-- Indexes: primary keys of host, ready and job; ready_due, ready_reserved, waiting_due.
CREATE OR REPLACE FUNCTION warp.claim_one(
    p_host int, p_now bigint, c_lane int[], c_stamp int[], c_digest int[], c_max int
) RETURNS TABLE (
    kind smallint, ord int, job bigint, id uuid, token bigint, run int, attempt int, lane int, stamp int, keyed bool,
    created_at bigint, due bigint, payload text, metadata text, trace_parent text, explicit int, slot_key bigint
)
LANGUAGE plpgsql
-- As in the exchange: a walk along an index whatever the statistics say. There are no joins to go wrong.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    v_look record;
    v_row record;
BEGIN
    -- An expression costs a tenth of a query. It is never NULL.
    IF pg_advisory_xact_lock_shared(hashtext('warp.host'), p_host) IS NULL THEN
        RETURN;
    END IF;
    -- Two of each lane tell whether there is more than one, and whose it is.
    SELECT h.paused_at IS NULL AND NOT EXISTS (SELECT FROM warp.queue_pause) AS is_open,
           (SELECT min(w.due) FROM warp.waiting w WHERE w.place = 0) AS next_due, f.*
      INTO v_look
      FROM warp.host h
     CROSS JOIN LATERAL (
           SELECT count(c.handle) AS candidates, min(c.handle) AS job, min(l.at) FILTER (WHERE c.handle IS NOT NULL) AS at,
                  coalesce(bool_or(c.is_special OR EXISTS (SELECT FROM warp.ready r WHERE r.lane = l.lane AND r.place = 3)), false) AS is_special
             FROM unnest(c_lane) WITH ORDINALITY l (lane, at)
             LEFT JOIN LATERAL (SELECT r.handle, r.explicit IS NOT NULL OR r.keys IS NOT NULL OR r.bytes IS NOT NULL AS is_special
                                  FROM warp.ready r WHERE r.lane = l.lane AND r.place = 1 ORDER BY r.due, r.handle LIMIT 2) c ON true) f
     WHERE h.id = p_host;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'host % is not registered any more', p_host USING ERRCODE = 'WH001';
    END IF;
    IF NOT v_look.is_open OR v_look.is_special OR v_look.candidates > 1 OR v_look.next_due <= v_now THEN
        RETURN QUERY SELECT * FROM warp.exchange(
            p_host => p_host, p_now => p_now, c_lane => c_lane, c_stamp => c_stamp, c_digest => c_digest, c_max => c_max,
            c_keyed => array_fill(false, array[cardinality(c_lane)]),
            s_ord => '{}', s_job => '{}', s_token => '{}', s_took => '{}', s_result => '{}', s_other => NULL,
            l_ord => '{}', l_job => '{}', l_at => '{}', l_stream => '{}', l_body => '{}',
            h_ord => '{}', h_id => '{}', h_lane => '{}', h_payload => '{}', h_metadata => '{}', h_trace => '{}', h_due => '{}',
            h_explicit => '{}', h_unique => '{}', c_from_due => array_fill(NULL::bigint, array[cardinality(c_lane)]),
            c_from_job => array_fill(NULL::bigint, array[cardinality(c_lane)]),
            k_job => '{}', k_stamp => '{}', k_keys => '{}', k_error => '{}', k_reserved => '{}', k_page => NULL, p_session => NULL,
            n_key => '{}', n_from => '{}', n_from_token => '{}', n_to => '{}', n_to_token => '{}', s_passed => '{}',
            w_key => '{}', w_most => '{}', w_extra => 0);
        RETURN;
    END IF;
    kind := 0;
    job := v_look.next_due;
    token := v_now;
    payload := '{"parked":0,"again":0,"skipped":0,"unacceptable":0,"more":false,"reserved":[],"page":null}';
    RETURN NEXT;
    IF v_look.candidates = 1 THEN
        -- Whoever has changed it since it was seen has taken it, or holds it.
        DELETE FROM warp.ready r
         WHERE r.ctid = (SELECT c.ctid FROM warp.ready c
                          WHERE c.handle = v_look.job AND c.place = 1 AND c.explicit IS NULL AND c.keys IS NULL AND c.bytes IS NULL
                            FOR UPDATE SKIP LOCKED)
        RETURNING r.handle, r.due, r.lane, r.run + 1 AS run, r.attempt + 1 AS attempt, r.deaths, r.is_unique, r.settled, r.ticket,
                  coalesce(r.stamp, c_stamp[v_look.at]) AS stamp INTO v_row;
        IF FOUND THEN
            -- After the grant (C1).
            token := nextval('warp.token');
            INSERT INTO warp.running (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, stamp, digest, host, claimed_at, token, settled, ticket)
            VALUES (v_row.handle, v_row.due, v_now, v_row.lane, v_row.run, v_row.attempt, v_row.deaths, 4, v_row.is_unique, v_row.stamp,
                    c_digest[v_look.at], p_host, v_now, claim_one.token, v_row.settled, v_row.ticket);
            SELECT j.id, j.created_at, j.payload, j.metadata, j.trace_parent INTO id, created_at, payload, metadata, trace_parent
              FROM warp.job j WHERE j.handle = v_row.handle;
            kind := 2;
            ord := 0;
            job := v_row.handle;
            run := v_row.run;
            attempt := v_row.attempt;
            lane := v_row.lane;
            stamp := v_row.stamp;
            keyed := false;
            due := v_row.due;
            RETURN NEXT;
        END IF;
    END IF;
END $$;
