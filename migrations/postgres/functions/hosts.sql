-- Hosts: they come, tick, go, die (slots.md C3, B5, B7); and who counts in the lines of keys.
--
-- What must stay true: whoever takes a host away, or changes from which lanes anybody may claim, does it in one
-- transaction with what that changes in the lines. A tick waits for nobody but its own row: whatever is locked at that
-- moment is left to the next one, because a lease must not lapse behind somebody else's lock.
--
-- Locks, beside the order in ledger.sql: a host's own lock (`warp.host`, its number) comes first, exclusively for a rescue
-- and a deregistration; then, for whoever changes the claimable lanes, `warp.lanes`.

-- What every statement of a host that is not registered hears.
CREATE OR REPLACE FUNCTION warp.host_lost(p_host int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'host % is not registered any more; its runs have been given back', p_host USING ERRCODE = 'WH001';
END $$;

-- A registration. Its number is never given again. The row of `setting` is shared until the commit, so that
-- `warp.set_locks` either sees this host or has changed the kind before.
CREATE OR REPLACE FUNCTION warp.register_host(p_name text, p_version text, p_locks text, p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_host int;
BEGIN
    PERFORM FROM warp.setting s WHERE s.locks = p_locks FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'slots are not made of % locks any more; start the host again', p_locks USING ERRCODE = 'WH003';
    END IF;
    INSERT INTO warp.host_name (name) VALUES (p_name) RETURNING id INTO v_host;
    INSERT INTO warp.host (id, version, renewals, started_at, renewed_at) VALUES (v_host, p_version, 0, v_now, v_now);
    RETURN v_host;
END $$;

-- Every registered host, as others see it. Index: the first column of running's primary key.
CREATE OR REPLACE FUNCTION warp.hosts_seen() RETURNS TABLE (
    id int, name text, renewals bigint, started_at bigint, renewed_at bigint, running bigint, paused_by text, paused_at bigint
) LANGUAGE sql STABLE AS $$
    SELECT h.id, n.name, h.renewals, h.started_at, h.renewed_at,
           (SELECT count(*) FROM warp.running r WHERE r.host = h.id), h.paused_by, h.paused_at
      FROM warp.host h JOIN warp.host_name n ON n.id = h.id ORDER BY h.id
$$;

-- Lanes from which some host may claim. One row for each contract and queue that was ever used. Whoever changes them has
-- the lock, so what is read here stays until he has compared.
CREATE OR REPLACE FUNCTION warp.lock_lanes() RETURNS int[] LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('warp.lanes'), 0);
    RETURN array(SELECT c.lane FROM warp.claimable_lane c);
END $$;

-- Lanes that have become claimable, or are no more, since `warp.lock_lanes` was called.
CREATE OR REPLACE FUNCTION warp.changed_lanes(p_before int[]) RETURNS int[] LANGUAGE sql AS $$
    SELECT array(SELECT coalesce(b.lane, a.lane)
                   FROM unnest(p_before) b (lane) FULL JOIN (SELECT c.lane FROM warp.claimable_lane c) a ON a.lane = b.lane
                  WHERE a.lane IS NULL OR b.lane IS NULL)
$$;

-- Keys on which a job of these lanes is parked. Reads all of waiting_parked, and only where a lane finds or loses its last
-- host, or is paused or resumed.
CREATE OR REPLACE FUNCTION warp.lines_of(p_lanes int[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_lanes) = 0 THEN
        RETURN '{}';
    END IF;
    RETURN array(SELECT DISTINCT w.parked_on FROM warp.waiting w WHERE w.place = 2 AND w.lane = ANY (p_lanes) ORDER BY 1);
END $$;

-- B7, C5: who counts in a line has changed, so every key where such a job is parked is handed on, and whoever may claim is
-- told. For commands that lock no other keys.
CREATE OR REPLACE FUNCTION warp.hand_on_changed(p_before int[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_lanes int[] := warp.changed_lanes(p_before);
    v_keys bigint[] := warp.lines_of(v_lanes);
BEGIN
    PERFORM warp.lock_keys(v_keys);
    PERFORM warp.hand_on_all(v_keys, p_now);
    PERFORM warp.announce(v_lanes);
    PERFORM warp.announce_keys(v_keys);
END $$;

-- Replaces what a host can run. `p_number` counts the publications of a host as it sends them, so that one which the network
-- has held back changes nothing any more once a later one was written. The numbers are compared under the lock of
-- `warp.lanes`, and the host's row is written at the end: a renewal waits for it for no longer than a commit.
CREATE OR REPLACE FUNCTION warp.serve_host(p_host int, p_contracts text[], p_now bigint, p_number bigint DEFAULT NULL)
RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_before int[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('warp.host'), p_host);
    IF NOT EXISTS (SELECT FROM warp.host h WHERE h.id = p_host) THEN
        PERFORM warp.host_lost(p_host);
    END IF;
    v_before := warp.lock_lanes();
    IF EXISTS (SELECT FROM warp.host h WHERE h.id = p_host AND h.served >= p_number) THEN
        RETURN;
    END IF;
    DELETE FROM warp.host_contract c WHERE c.host = p_host AND c.contract <> ALL (p_contracts);
    INSERT INTO warp.host_contract (host, contract) SELECT p_host, c FROM unnest(p_contracts) c ON CONFLICT DO NOTHING;
    PERFORM warp.hand_on_changed(v_before, coalesce(p_now, warp.clock()));
    UPDATE warp.host h SET served = p_number WHERE h.id = p_host AND p_number IS NOT NULL;
END $$;

-- Takes runs of a host out of `running`, ordered, without those that it knows (NULL: all of them). Their row locks come
-- before any key's (B1). Index: running's primary key.
CREATE OR REPLACE FUNCTION warp.take_runs(p_host int, p_jobs bigint[]) RETURNS warp.state_row[] LANGUAGE sql AS $$
    WITH gone AS (DELETE FROM warp.running r WHERE r.host = p_host AND (p_jobs IS NULL OR r.handle = ANY (p_jobs)) RETURNING *)
    SELECT coalesce(array_agg(g::warp.state_row ORDER BY g.handle), '{}') FROM gone g
$$;

-- All keys of these rows.
CREATE OR REPLACE FUNCTION warp.keys_of(p_rows warp.state_row[]) RETURNS bigint[] LANGUAGE sql AS $$
    SELECT array(SELECT DISTINCT k FROM unnest(p_rows) r CROSS JOIN LATERAL unnest(r.keys) k ORDER BY k)
$$;

-- Who wants this run cancelled, if somebody does; the wish is fulfilled by what follows. Primary key.
CREATE OR REPLACE FUNCTION warp.take_cancellation(p_row warp.state_row) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_by text;
BEGIN
    DELETE FROM warp.cancel_request c WHERE c.job = p_row.handle
        RETURNING CASE WHEN c.token = p_row.token THEN c.asked_by END INTO v_by;
    RETURN v_by;
END $$;

-- Runs that were taken go back uncharged; those that somebody wanted cancelled end. All their keys are locked.
CREATE OR REPLACE FUNCTION warp.give_back(p_rows warp.state_row[], p_why text, p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_row warp.state_row;
    v_by text;
BEGIN
    FOREACH v_row IN ARRAY p_rows LOOP
        v_by := warp.take_cancellation(v_row);
        PERFORM warp.leave(v_row, CASE WHEN v_by IS NULL THEN jsonb_build_object('to', 'hand-back', 'message', p_why)
                                       ELSE jsonb_build_object('to', 'cancelled', 'by', v_by) END, NULL, p_now);
    END LOOP;
    PERFORM warp.announce(array(SELECT DISTINCT r.lane FROM unnest(p_rows) r));
    PERFORM warp.announce_keys(warp.keys_of(p_rows));
END $$;

-- Which of these keys nobody else holds; they are locked now.
CREATE OR REPLACE FUNCTION warp.try_lock_keys(p_keys bigint[]) RETURNS bigint[] LANGUAGE sql AS $$
    SELECT coalesce(array_agg(l.id), '{}')
      FROM (SELECT c.id FROM warp.conc_key c WHERE c.id = ANY (p_keys) ORDER BY c.id FOR UPDATE SKIP LOCKED) l
$$;

-- B7: reservations and wakes that nobody claimed in time go back into their lines, the slots on to the next, at most a
-- thousand at once. What somebody holds at this moment, row or key, is left to the next time.
-- Index: ready_woken, all of it; it holds what is reserved or woken at this moment.
CREATE OR REPLACE FUNCTION warp.expire_reservations(p_patience bigint, p_now bigint) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_jobs bigint[];
    v_keys bigint[];
    v_job bigint;
    v_row warp.state_row;
    v_is_fifo bool;
    v_expired int := 0;
BEGIN
    SELECT array_agg(s.handle ORDER BY s.changed_at, s.handle), array_agg(DISTINCT s.parked_on) INTO v_jobs, v_keys
      FROM (SELECT r.handle, r.changed_at, r.parked_on FROM warp.ready r
             WHERE r.parked_on IS NOT NULL AND r.changed_at <= v_now - p_patience
             ORDER BY r.changed_at, r.handle LIMIT 1000 FOR UPDATE SKIP LOCKED) s;
    IF v_jobs IS NULL THEN
        RETURN 0;
    END IF;
    v_keys := warp.try_lock_keys(v_keys);
    FOREACH v_job IN ARRAY v_jobs LOOP
        DELETE FROM warp.ready r WHERE r.handle = v_job AND r.parked_on = ANY (v_keys) RETURNING * INTO v_row;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM warp.slot s WHERE s.job = v_job;
        SELECT p.is_fifo INTO v_is_fifo FROM warp.policy p WHERE p.id = v_row.stamp;
        IF NOT v_is_fifo OR v_row.ticket IS NULL THEN
            -- At the end of the line, unless its order is kept: nobody may want it where it stood.
            v_row.ticket := nextval('warp.ticket');
        END IF;
        v_row.place := 2;
        v_row.changed_at := v_now;
        INSERT INTO warp.waiting VALUES (v_row.*);
        IF warp.by_session() THEN
            -- A7: it has not tried the key that it was woken for.
            PERFORM warp.session_wake_missing(v_row.parked_on, 1, 0, v_now);
        ELSE
            PERFORM warp.hand_on(v_row.parked_on, v_now);
        END IF;
        v_expired := v_expired + 1;
    END LOOP;
    PERFORM warp.announce_keys(v_keys);
    RETURN v_expired;
END $$;

-- Adds up counters, at most so many rows at once, one caller at a time. Readers see the rows before or their sum.
CREATE OR REPLACE FUNCTION warp.fold_counters() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM warp.counter LIMIT 500) c) = 500
       AND pg_try_advisory_xact_lock(hashtext('warp.counter'), 0) THEN
        WITH gone AS (
            DELETE FROM warp.counter c WHERE c.ctid = ANY (array(SELECT f.ctid FROM warp.counter f LIMIT 20000)) RETURNING c.name, c.value
        )
        INSERT INTO warp.counter (name, value) SELECT g.name, sum(g.value) FROM gone g GROUP BY g.name;
    END IF;
END $$;

-- A host's regular tick. Renews its lease, which from then on nobody's rescue takes; hands back the rows under its name
-- that it does not know, and names the runs it knows that are not its own; gives unclaimed reservations back (not with a
-- NULL patience); folds counters; looks at every host.
-- `p_number` counts the renewals of a host as it sends them, so that one which the network has held back is known when a
-- later one was written: what the host has claimed since is not in its list, and must not be handed back.
-- Locks: the host's row, which only a rescue holds for longer than a moment; everything else only where it is free.
CREATE OR REPLACE FUNCTION warp.renew_host(
    p_host int, p_number bigint, p_jobs bigint[], p_tokens bigint[], p_patience bigint, p_now bigint,
    OUT handed_back int, OUT lost int[], OUT expired int, OUT reserved bool, OUT hosts text
) LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    is_newest bool;
    v_unknown bigint[];
    v_keys bigint[];
    v_rows warp.state_row[];
BEGIN
    UPDATE warp.host h SET renewals = coalesce(p_number, h.renewals + 1), renewed_at = v_now
     WHERE h.id = p_host AND (p_number IS NULL OR h.renewals < p_number);
    is_newest := FOUND;
    IF NOT is_newest AND NOT EXISTS (SELECT FROM warp.host h WHERE h.id = p_host) THEN
        PERFORM warp.host_lost(p_host);
    END IF;
    -- The places, from 1, of what is known there and not here.
    lost := array(SELECT k.at FROM unnest(p_jobs, p_tokens) WITH ORDINALITY k (job, token, at)
                   WHERE NOT EXISTS (SELECT FROM warp.running r WHERE r.host = p_host AND r.handle = k.job AND r.token = k.token)
                   ORDER BY k.at);
    SELECT array_agg(u.handle), array_agg(DISTINCT u.key) FILTER (WHERE u.key IS NOT NULL) INTO v_unknown, v_keys
      FROM (SELECT r.handle, r.keys FROM warp.running r
             WHERE r.host = p_host
               AND NOT EXISTS (SELECT FROM unnest(p_jobs, p_tokens) k (job, token) WHERE k.job = r.handle AND k.token = r.token)
               FOR UPDATE OF r SKIP LOCKED) l
      LEFT JOIN LATERAL unnest(l.keys) u0 (key) ON true
     CROSS JOIN LATERAL (SELECT l.handle, u0.key) u;
    handed_back := 0;
    IF is_newest AND v_unknown IS NOT NULL THEN
        v_keys := warp.try_lock_keys(v_keys);
        v_unknown := array(SELECT r.handle FROM warp.running r
                            WHERE r.host = p_host AND r.handle = ANY (v_unknown) AND (r.keys IS NULL OR r.keys <@ v_keys));
        v_rows := warp.take_runs(p_host, v_unknown);
        handed_back := cardinality(v_rows);
        PERFORM warp.give_back(v_rows, 'its host does not know of this run', v_now);
    END IF;
    expired := CASE WHEN p_patience IS NULL THEN 0 ELSE warp.expire_reservations(p_patience, v_now) END;
    IF p_patience IS NOT NULL AND warp.by_session() THEN
        PERFORM warp.session_sweep(v_now);
    END IF;
    reserved := EXISTS (SELECT FROM warp.ready r WHERE r.parked_on IS NOT NULL);
    PERFORM warp.fold_counters();
    hosts := (SELECT json_agg(json_build_array(s.id, s.name, s.renewals, s.started_at, s.renewed_at, s.running, s.paused_by, s.paused_at))
                FROM warp.hosts_seen() s)::text;
END $$;

-- Takes a registration away; the host's own lock is held exclusively. Its runs, ordered, all keys that this changes locked.
CREATE OR REPLACE FUNCTION warp.remove_host(p_host int, OUT runs warp.state_row[], OUT lanes int[], OUT keys bigint[]) LANGUAGE plpgsql AS $$
DECLARE
    v_before int[] := warp.lock_lanes();
BEGIN
    DELETE FROM warp.host_contract c WHERE c.host = p_host;
    DELETE FROM warp.host h WHERE h.id = p_host;
    runs := warp.take_runs(p_host, NULL);
    lanes := warp.changed_lanes(v_before);
    keys := warp.lines_of(lanes);
    PERFORM warp.lock_keys(keys || warp.keys_of(runs));
END $$;

-- Ends a registration; whatever the host still runs goes back uncharged.
CREATE OR REPLACE FUNCTION warp.deregister_host(p_host int, p_now bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_left record;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('warp.host'), p_host);
    IF NOT EXISTS (SELECT FROM warp.host h WHERE h.id = p_host) THEN
        PERFORM warp.host_lost(p_host);
    END IF;
    SELECT * INTO v_left FROM warp.remove_host(p_host);
    PERFORM warp.give_back(v_left.runs, 'its host stopped', v_now);
    PERFORM warp.hand_on_all(v_left.keys, v_now);
    PERFORM warp.announce(v_left.lanes);
    PERFORM warp.announce_keys(v_left.keys);
END $$;

-- Ends the statements that hold a host's lock. One whose client has stopped reading (a frozen host, a silent network) can
-- wait in the middle of its answer for as long as that client likes, with all its locks, and no timeout of the server's
-- ends it. Without the right to (the host came under another name) it is waited for after all.
CREATE OR REPLACE FUNCTION warp.end_statements_of(p_host int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Two numbers make a lock whose objsubid is 2. Only the host's own statements hold it shared.
    PERFORM pg_terminate_backend(l.pid)
       FROM pg_locks l
      WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.mode = 'ShareLock' AND l.granted
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND l.classid::bigint = hashtext('warp.host')::bigint & 4294967295 AND l.objid::bigint = p_host
        AND l.pid <> pg_backend_pid();
EXCEPTION WHEN insufficient_privilege THEN
    RAISE WARNING 'the statements of host % cannot be ended; waiting for them', p_host;
END $$;

-- B5: the rows of a dead host go back, uncharged, if it has not renewed since; after too many deaths a job is Failed. From
-- the host's lock on none of its claims commits, and its renewal finds no row.
CREATE OR REPLACE FUNCTION warp.rescue_host(
    p_host int, p_renewals bigint, p_max_deaths int, p_now bigint, OUT requeued int, OUT exhausted int
) LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_left record;
    v_row warp.state_row;
    v_by text;
    v_exit jsonb;
    v_backend int;
BEGIN
    requeued := 0;
    exhausted := 0;
    IF NOT pg_try_advisory_xact_lock(hashtext('warp.host'), p_host) THEN
        IF NOT EXISTS (SELECT FROM warp.host h WHERE h.id = p_host AND h.renewals = p_renewals) THEN
            RETURN;
        END IF;
        PERFORM warp.end_statements_of(p_host);
        PERFORM pg_advisory_xact_lock(hashtext('warp.host'), p_host);
    END IF;
    SELECT h.lock_backend INTO v_backend FROM warp.host h WHERE h.id = p_host AND h.renewals = p_renewals FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO v_left FROM warp.remove_host(p_host);
    -- A12: the locks of a process that stands still would stay for ever.
    PERFORM warp.end_session(v_backend) WHERE v_backend IS NOT NULL;
    FOREACH v_row IN ARRAY v_left.runs LOOP
        v_row.deaths := v_row.deaths + 1;
        v_by := warp.take_cancellation(v_row);
        IF v_by IS NOT NULL THEN
            v_exit := jsonb_build_object('to', 'cancelled', 'by', v_by);
        ELSIF v_row.deaths > p_max_deaths THEN
            exhausted := exhausted + 1;
            v_exit := jsonb_build_object('to', 'failed', 'reason', 'recovery-exhausted',
                                         'message', format('its hosts died under it %s times', v_row.deaths));
        ELSE
            requeued := requeued + 1;
            v_exit := '{"to": "rescued"}';
        END IF;
        PERFORM warp.leave(v_row, v_exit, NULL, v_now);
    END LOOP;
    PERFORM warp.hand_on_all(v_left.keys, v_now);
    PERFORM warp.announce(v_left.lanes || array(SELECT DISTINCT r.lane FROM unnest(v_left.runs) r));
    PERFORM warp.announce_keys(v_left.keys || warp.keys_of(v_left.runs));
END $$;

-- Output of a run that goes on; false if it does not. The row is held so that the job cannot be removed meanwhile.
CREATE OR REPLACE FUNCTION warp.append_output(
    p_host int, p_job bigint, p_token bigint, p_at bigint[], p_streams text[], p_bodies text[], p_output jsonb
) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE
    v_run int;
BEGIN
    SELECT r.run INTO v_run FROM warp.running r WHERE r.host = p_host AND r.handle = p_job AND r.token = p_token FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO warp.log (job, at, run, stream, body)
    SELECT p_job, l.at, v_run, l.stream, l.body
      FROM unnest(p_at, p_streams, p_bodies) WITH ORDINALITY l (at, stream, body, n) ORDER BY l.n;
    PERFORM warp.keep_output(p_job, p_output);
    RETURN true;
END $$;

-- One write to shared state that applies at once, by a run that goes on. verdict: 0 written, 1 another value was there,
-- 2 it is no number, 3 the run is not this host's any more; with the value that is there.
CREATE OR REPLACE FUNCTION warp.apply_state_now(
    p_host int, p_job bigint, p_token bigint, p_bucket text, p_key text, p_change jsonb, OUT verdict int, OUT value text
) LANGUAGE plpgsql AS $$
DECLARE
    v_why text;
BEGIN
    -- The name before the row, as in `warp.exchange`.
    PERFORM pg_advisory_xact_lock(warp.state_lock(p_bucket, p_key));
    PERFORM FROM warp.running r WHERE r.host = p_host AND r.handle = p_job AND r.token = p_token FOR KEY SHARE;
    IF NOT FOUND THEN
        verdict := 3;
        RETURN;
    END IF;
    BEGIN
        value := warp.write_state(p_bucket, p_key, p_change);
        verdict := 0;
    EXCEPTION WHEN SQLSTATE 'WH004' THEN
        GET STACKED DIAGNOSTICS v_why = MESSAGE_TEXT, value = PG_EXCEPTION_DETAIL;
        IF v_why = 'conflict' THEN
            verdict := 1;
            -- Behind a `=`, so that nothing can be told from an empty text.
            value := CASE WHEN value <> '' THEN substr(value, 2) END;
        ELSE
            verdict := 2;
        END IF;
    END;
END $$;

-- Changes what slots are made of, while no host is registered and no slot is taken or reserved; else what is in the way: the
-- hosts, for how many milliseconds each has been silent, and the number of slots. What was reserved goes back into its line
-- first where no host is left: nobody could claim it, and nobody else would look after it (B7).
-- Locks the row of `setting`, so that no host registers meanwhile, then reads in new statements. Small tables, read whole.
CREATE OR REPLACE FUNCTION warp.set_locks(p_locks text, p_by text, p_now bigint, OUT hosts text[], OUT silent bigint[], OUT slots bigint)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM warp.setting FOR UPDATE;
    SELECT coalesce(array_agg(n.name ORDER BY h.id), '{}'), coalesce(array_agg(greatest(warp.clock() - h.renewed_at, 0) ORDER BY h.id), '{}')
      INTO hosts, silent FROM warp.host h JOIN warp.host_name n ON n.id = h.id;
    -- A thousand at once.
    FOR v_round IN 1 .. 1000 LOOP
        slots := (SELECT count(*) FROM warp.slot);
        EXIT WHEN slots = 0 OR cardinality(hosts) > 0 OR warp.expire_reservations(0, warp.clock()) = 0;
    END LOOP;
    IF cardinality(hosts) = 0 AND slots = 0 THEN
        UPDATE warp.setting SET locks = p_locks, locks_set_by = p_by, locks_set_at = p_now WHERE locks <> p_locks;
    END IF;
END $$;
