-- The ledger of slots (slots.md B) on the rows themselves, and every way out of a run and out of the line.
--
-- The rules are those of `domain::ledger`, which the simulation proves; this text is compared with it by the
-- differential test. All of it runs inside the one statement of a command (C2), READ COMMITTED: each query below sees
-- what was committed before *it* began, so what is counted after a key's row was locked cannot change until the commit
-- (B1; counting in the statement that locks would count the past, W2). Functions are VOLATILE for that reason.
--
-- Locks, in the order in which every command takes them: the host (advisory, shared), job rows, unique keys, shared
-- state, key rows in ascending order. Parked rows are taken with SKIP LOCKED only.

-- The lock of every key that a command touches, in the one global order (C4). Index: the primary key.
CREATE OR REPLACE FUNCTION warp.lock_keys(p_keys bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM warp.conc_key c WHERE c.id = ANY (p_keys) ORDER BY c.id FOR UPDATE;
END $$;

-- Counts `name` and, with a reason, `name:reason`.
CREATE OR REPLACE FUNCTION warp.count(p_name text, p_reason text, p_by bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO warp.counter (name, value)
    SELECT n.name, p_by FROM (VALUES (p_name), (p_name || ':' || p_reason)) n (name) WHERE n.name IS NOT NULL;
END $$;

-- Why a job cannot start on a key whose row is locked: 0 it can, 1 kept for a head in its retry delay, 2 behind an older
-- waiter, 3 paused, 4 too heavy, 5 full. `lim` is the limit that counted: admin limit, else stamp, at least 1. The job's
-- own reservation and place in line are out of the way already.
-- Indexes: primary keys of conc_key, slot and blocker; waiting_parked up to the first waiter that counts.
CREATE OR REPLACE FUNCTION warp.refusal(
    p_key bigint, p_ticket bigint, p_slots int, p_weight int,
    OUT why smallint, OUT lim int, OUT holder bigint, OUT by_stamp bool
) LANGUAGE plpgsql AS $$
DECLARE
    v_ticket bigint := coalesce(p_ticket, 9223372036854775807);
    v_stamped int := greatest(p_slots, 1);
    v_admin int;
    v_blocked bool;
    v_behind bool;
    v_held int;
    v_alone bigint;
    v_first bigint;
BEGIN
    SELECT c.admin_limit,
           EXISTS (SELECT FROM warp.blocker b WHERE b.key = p_key AND b.ticket < v_ticket),
           EXISTS (SELECT FROM warp.waiting w
                    WHERE w.place = 2 AND w.parked_on = p_key AND w.ticket < v_ticket
                      AND (c.admin_limit = 0
                           OR (SELECT p.weight <= coalesce(c.admin_limit, greatest(p.slots, 1)) FROM warp.policy p WHERE p.id = w.stamp))
                      AND (SELECT true FROM warp.claimable_lane a WHERE a.lane = w.lane))
      INTO v_admin, v_blocked, v_behind
      FROM warp.conc_key c WHERE c.id = p_key;
    SELECT count(*), min(s.job) FILTER (WHERE s.stamped <= 1),
           (array_agg(s.job ORDER BY s.token IS NULL, s.number))[1]
      INTO v_held, v_alone, v_first
      FROM warp.slot s WHERE s.key = p_key;
    lim := coalesce(v_admin, v_stamped);
    -- Only a key that is full at the stamped limit proves that the work is surplus; what an operator's lower limit,
    -- somebody's place in line or a retry delay refuses, waits.
    by_stamp := p_weight <= v_stamped AND v_held > 0 AND (v_held + p_weight > v_stamped OR v_alone IS NOT NULL);
    IF v_blocked THEN
        why := 1;
    ELSIF v_behind THEN
        why := 2;
    ELSIF lim = 0 THEN
        why := 3;
    ELSIF p_weight > lim THEN
        why := 4;
    ELSIF v_held > 0 AND v_held + p_weight > lim THEN
        why := 5;
        -- A run is a better proof for whoever is skipped than a job that only has its slot reserved.
        holder := v_first;
    ELSIF v_admin IS NULL AND v_alone IS NOT NULL THEN
        -- A holder at limit 1 lets nobody start beside it, whatever the newcomer was stamped with.
        why := 5;
        lim := 1;
        holder := v_alone;
    ELSE
        why := 0;
    END IF;
END $$;

-- Takes the lowest free numbers of a key. Without a token the slots are reserved (B4).
CREATE OR REPLACE FUNCTION warp.take(
    p_key bigint, p_job bigint, p_slots int, p_weight int, p_token bigint, p_host int, p_now bigint
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Nearly always one slot, and number 0 is free.
    IF p_weight = 1 THEN
        INSERT INTO warp.slot (key, number, job, stamped, since, token, host)
        SELECT p_key, coalesce(min(n.number), 0), p_job, p_slots, p_now, p_token, p_host
          FROM (SELECT 0 AS number WHERE NOT EXISTS (SELECT FROM warp.slot s WHERE s.key = p_key AND s.number = 0)
                UNION ALL
                SELECT s.number + 1 FROM warp.slot s WHERE s.key = p_key
                   AND NOT EXISTS (SELECT FROM warp.slot t WHERE t.key = p_key AND t.number = s.number + 1)) n;
        RETURN;
    END IF;
    INSERT INTO warp.slot (key, number, job, stamped, since, token, host)
    SELECT p_key, n, p_job, p_slots, p_now, p_token, p_host
      FROM generate_series(0, (SELECT count(*)::int FROM warp.slot s WHERE s.key = p_key) + p_weight - 1) n
     WHERE NOT EXISTS (SELECT FROM warp.slot s WHERE s.key = p_key AND s.number = n)
     ORDER BY n LIMIT p_weight;
END $$;

-- B4: while the oldest waiter that counts could start, it is given its slots, oldest first. One that needs further keys
-- is only woken (taking its other keys here would lock key rows out of order, W1) and counted against the later rounds
-- of this transaction: it stands in `ready` as a row that this transaction has written. The key's row is locked.
-- SKIP LOCKED passes over a row that an operator is changing; that command hands the key on itself.
-- Indexes: waiting_parked in its order, ready_woken, primary keys of slot, blocker, policy, lane.
CREATE OR REPLACE FUNCTION warp.hand_on(p_key bigint, p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_admin int;
    v_waiter record;
    v_row warp.state_row;
    v_held int;
    v_alone bool;
    v_promised int;
    v_promised_away bool;
    v_limit int;
    v_slots int;
    v_weight int;
    v_count int := 0;
    -- What earlier calls of this exchange have woken.
    v_woken bigint[] := nullif(current_setting('warp.woken', true), '');
BEGIN
    IF warp.by_session() THEN
        RETURN warp.session_wake_missing(p_key, 0, 0, p_now);
    END IF;
    SELECT c.admin_limit INTO v_admin FROM warp.conc_key c WHERE c.id = p_key;
    IF v_admin = 0 THEN
        RETURN 0;
    END IF;
    LOOP
        SELECT count(*), coalesce(bool_or(s.stamped <= 1), false) INTO v_held, v_alone FROM warp.slot s WHERE s.key = p_key;
        -- Where nobody could start, whoever is next, nobody is looked for.
        EXIT WHEN v_held > 0 AND (v_admin IS NULL AND v_alone OR v_held >= v_admin);
        -- One table and single values beside it: so the line is walked in its order to the first who counts, and never
        -- read as a whole and sorted.
        SELECT w.handle, w.ticket, w.stamp, cardinality(w.keys) > 1 AS several INTO v_waiter
          FROM warp.waiting w
         WHERE w.place = 2 AND w.parked_on = p_key
           AND (SELECT p.weight <= coalesce(v_admin, greatest(p.slots, 1)) FROM warp.policy p WHERE p.id = w.stamp)
           AND (SELECT true FROM warp.claimable_lane a WHERE a.lane = w.lane)
         ORDER BY w.ticket LIMIT 1 FOR UPDATE OF w SKIP LOCKED;
        EXIT WHEN NOT FOUND;
        SELECT p.slots, p.weight INTO v_slots, v_weight FROM warp.policy p WHERE p.id = v_waiter.stamp;
        EXIT WHEN EXISTS (SELECT FROM warp.blocker b WHERE b.key = p_key AND b.ticket < v_waiter.ticket);
        SELECT coalesce(sum(p.weight), 0), coalesce(bool_or(p.slots <= 1), false) INTO v_promised, v_promised_away
          FROM warp.ready r JOIN warp.policy p ON p.id = r.stamp
         WHERE r.parked_on = p_key AND r.place = 1 AND (r.xmin = pg_current_xact_id()::xid OR r.handle = ANY (v_woken));
        v_limit := coalesce(v_admin, greatest(v_slots, 1));
        EXIT WHEN v_admin IS NULL AND v_promised_away;
        EXIT WHEN v_weight + v_promised > v_limit OR v_held > 0 AND v_held + v_weight + v_promised > v_limit;
        DELETE FROM warp.waiting w WHERE w.handle = v_waiter.handle RETURNING * INTO v_row;
        v_row.changed_at := p_now;
        v_row.place := 1;
        IF NOT v_waiter.several THEN
            v_row.place := 3;
            PERFORM warp.take(p_key, v_row.handle, v_slots, v_weight, NULL, NULL, p_now);
        END IF;
        INSERT INTO warp.ready VALUES (v_row.*);
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

CREATE OR REPLACE FUNCTION warp.hand_on_all(p_keys bigint[], p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_key bigint;
    v_count int := 0;
BEGIN
    FOREACH v_key IN ARRAY p_keys LOOP
        v_count := v_count + warp.hand_on(v_key, p_now);
    END LOOP;
    RETURN v_count;
END $$;

-- B3, B5, C5: a job leaves its slots, its reservation or its place in line, and each of its keys is handed on. Its row
-- stands where it goes already. Index: slot_job.
CREATE OR REPLACE FUNCTION warp.release(p_job bigint, p_keys bigint[], p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    -- A session lock is given back after this has been committed, and wakes then (A5).
    IF warp.by_session() THEN
        RETURN 0;
    END IF;
    DELETE FROM warp.slot s WHERE s.job = p_job;
    RETURN warp.hand_on_all(p_keys, p_now);
END $$;

-- The job has started, stands in line again or ends without running again, and keeps no key through a delay any more.
-- Index: blocker_job.
CREATE OR REPLACE FUNCTION warp.unblock(p_job bigint, p_keys bigint[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM warp.blocker b WHERE b.job = p_job;
    IF FOUND THEN
        PERFORM warp.hand_on_all(p_keys, p_now);
    END IF;
END $$;

-- B2: whether a keyed job starts. `p_row` has been taken out of `ready` (its place tells whether it was reserved), carries
-- stamp and keys, and all its key rows are locked. It goes to `running`, `waiting` or `ended`, with its history.
-- verdict: 1 started, 2 parked, 3 skipped; `again` whether it had been parked before; `fills` whether whoever comes
-- after it with the same stamp is refused as well; the row as it stands now.
CREATE OR REPLACE FUNCTION warp.admit(
    INOUT p_row warp.state_row, p_has_started bool, p_host int, p_digest int, p_now bigint,
    OUT verdict smallint, OUT again bool, OUT fills bool
) LANGUAGE plpgsql AS $$
DECLARE
    v_policy record;
    v_key bigint;
    v_refusal record;
    v_text text;
    v_holder text;
    v_holds bool := false;
BEGIN
    SELECT p.slots, p.weight, p.skips, p.is_fifo INTO v_policy FROM warp.policy p WHERE p.id = p_row.stamp;
    again := p_row.refusal IS NOT NULL;
    IF p_row.place = 3 THEN
        -- A reserved job only gets its token, unless an operator has lowered the limit since. Only runs count against
        -- it, so that of two reservations under a lowered limit the first to be claimed starts.
        SELECT bool_and(m.mine > 0 AND m.others + m.mine <= coalesce(c.admin_limit, greatest(v_policy.slots, 1))
                        AND NOT (c.admin_limit IS NULL AND m.alone))
          INTO v_holds
          FROM warp.conc_key c
         CROSS JOIN LATERAL (
                SELECT count(*) FILTER (WHERE s.job = p_row.handle) AS mine,
                       count(*) FILTER (WHERE s.job <> p_row.handle AND s.token IS NOT NULL) AS others,
                       coalesce(bool_or(s.stamped <= 1) FILTER (WHERE s.job <> p_row.handle AND s.token IS NOT NULL), false) AS alone
                  FROM warp.slot s WHERE s.key = c.id) m
         WHERE c.id = ANY (p_row.keys);
        IF NOT v_holds THEN
            DELETE FROM warp.slot s WHERE s.job = p_row.handle;
        END IF;
    END IF;
    IF NOT v_holds THEN
        FOREACH v_key IN ARRAY p_row.keys LOOP
            SELECT * INTO v_refusal FROM warp.refusal(v_key, p_row.ticket, v_policy.slots, v_policy.weight);
            CONTINUE WHEN v_refusal.why = 0;
            SELECT c.key INTO v_text FROM warp.conc_key c WHERE c.id = v_key;
            IF v_policy.skips AND NOT p_has_started AND v_refusal.why = 5 AND v_refusal.by_stamp THEN
                -- Skip deletes work, so it is decided once, before the first start, and the holder is the proof.
                SELECT j.id::text INTO v_holder FROM warp.job j WHERE j.handle = v_refusal.holder;
                p_row.place := 12;
                p_row.changed_at := p_now;
                IF p_row.is_unique THEN
                    DELETE FROM warp.unique_key u WHERE u.job = p_row.handle;
                    p_row.is_unique := false;
                END IF;
                INSERT INTO warp.ended VALUES (p_row.*);
                INSERT INTO warp.audit (job, at, event, run, runs, message)
                VALUES (p_row.handle, p_now, 8, 0, p_row.run,
                        format('Cancelled — ''%s'' full (%s slots), held by %s', v_text, v_refusal.lim, coalesce(v_holder, 'a job that is gone')));
                PERFORM warp.count('stats:deleted', 'skip', 1);
                PERFORM warp.count('kept:deleted', NULL, 1);
                PERFORM warp.hand_on_all(p_row.keys, p_now);
                verdict := 3;
                RETURN;
            END IF;
            v_text := format('''%s'' %s', v_text, CASE
                WHEN v_refusal.why IN (2, 3) AND v_refusal.lim = 0 THEN 'paused (0 slots)'
                WHEN v_refusal.why IN (2, 5) THEN format('full (%s slots)', v_refusal.lim)
                WHEN v_refusal.why = 4 THEN format('cannot run at limit %s', v_refusal.lim)
                ELSE 'kept for a retry' END);
            p_row.ticket := coalesce(p_row.ticket, nextval('warp.ticket'));
            p_row.place := 2;
            p_row.parked_on := v_key;
            p_row.changed_at := p_now;
            IF p_row.refusal IS NULL THEN
                -- The history hears of the first time only: the rest is one wait.
                INSERT INTO warp.audit (job, at, event, run, runs, message)
                VALUES (p_row.handle, p_now, 7, 0, p_row.run, 'Requeued — ' || v_text);
                PERFORM warp.count('stats:requeued', 'concurrency', 1);
            END IF;
            p_row.refusal := v_text;
            fills := v_refusal.why IN (2, 3, 5) AND NOT v_policy.skips;
            INSERT INTO warp.waiting VALUES (p_row.*);
            -- From here on its place in line stands for it. A blocker besides would outlast its start.
            PERFORM warp.unblock(p_row.handle, p_row.keys, p_now);
            -- W4: a job that was woken for one key and is refused on another hands that key on. On a single key somebody
            -- older may be found too: one who was not given the slot while it was promised to a job with several keys.
            PERFORM warp.hand_on_all(p_row.keys, p_now);
            verdict := 2;
            RETURN;
        END LOOP;
    END IF;
    -- Drawn after the grant, under the keys' locks.
    p_row.token := nextval('warp.token');
    IF v_holds THEN
        UPDATE warp.slot s SET token = p_row.token, host = p_host WHERE s.job = p_row.handle;
    ELSE
        FOREACH v_key IN ARRAY p_row.keys LOOP
            PERFORM warp.take(v_key, p_row.handle, v_policy.slots, v_policy.weight, p_row.token, p_host, p_now);
        END LOOP;
        IF v_policy.is_fifo AND p_row.ticket IS NULL THEN
            -- A retry that keeps the key must stand in front of those who queued behind this start.
            p_row.ticket := nextval('warp.ticket');
        END IF;
    END IF;
    p_row.place := 4;
    p_row.run := p_row.run + 1;
    p_row.attempt := p_row.attempt + 1;
    p_row.host := p_host;
    p_row.digest := p_digest;
    p_row.claimed_at := p_now;
    p_row.changed_at := p_now;
    p_row.took_us := NULL;
    p_row.parked_on := NULL;
    p_row.refusal := NULL;
    INSERT INTO warp.running VALUES (p_row.*);
    PERFORM warp.unblock(p_row.handle, p_row.keys, p_now);
    verdict := 1;
END $$;

-- B8: the limit under which every slot of a key was taken, if a slot of it may pass on inside this host: the host holds
-- one, no operator's limit is in force, and nobody keeps the key through a retry delay. Else NULL. The key's row is locked.
-- Indexes: primary keys of slot, blocker and conc_key.
CREATE OR REPLACE FUNCTION warp.passes_inside(p_key bigint, p_host int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_limit int;
BEGIN
    SELECT CASE WHEN min(s.stamped) = max(s.stamped) AND bool_or(s.host = p_host AND s.token IS NOT NULL) THEN greatest(min(s.stamped), 1) END
      INTO v_limit
      FROM warp.slot s
     WHERE s.key = p_key
       AND NOT EXISTS (SELECT FROM warp.blocker b WHERE b.key = p_key)
       AND EXISTS (SELECT FROM warp.conc_key c WHERE c.id = p_key AND c.admin_limit IS NULL);
    RETURN v_limit;
END $$;

-- B8: takes the oldest waiters of a key, as far as they may wait inside this host: it holds a slot that will come to them.
-- Who counts in the line is as in `warp.hand_on`; nobody behind one who counts and may not is taken, nor who was due after `p_due` (NULL is no bound). They are runs of the host without a slot; their tokens grow in the line's order.
-- The key's row is locked. SKIP LOCKED passes over a row that an operator is changing, as `warp.hand_on` does.
-- Indexes: waiting_parked in its order, primary keys of waiting and policy.
CREATE OR REPLACE FUNCTION warp.take_waiters(p_key bigint, p_most int, p_host int, p_lanes int[], p_digests int[], p_due bigint, p_now bigint)
RETURNS TABLE (handle bigint, token bigint, run int, attempt int, lane int, stamp int, due bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_limit int := warp.passes_inside(p_key, p_host);
BEGIN
    IF v_limit IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH line AS MATERIALIZED (
        SELECT w.handle, w.ticket, w.due, w.lane, w.stamp, w.keys FROM warp.waiting w
         WHERE w.place = 2 AND w.parked_on = p_key
           AND (SELECT p.weight <= greatest(p.slots, 1) FROM warp.policy p WHERE p.id = w.stamp)
           AND (SELECT true FROM warp.claimable_lane a WHERE a.lane = w.lane)
         ORDER BY w.ticket LIMIT p_most FOR UPDATE SKIP LOCKED
    ), fit AS MATERIALIZED (
        SELECT l.handle, bool_and(cardinality(l.keys) = 1 AND l.lane = ANY (p_lanes) AND (p_due IS NULL OR l.due <= p_due)
                                  AND coalesce((SELECT p.weight = 1 AND NOT p.is_fifo AND greatest(p.slots, 1) = v_limit FROM warp.policy p WHERE p.id = l.stamp), false))
                         OVER (ORDER BY l.ticket) AS may
          FROM line l
    ), gone AS (
        DELETE FROM warp.waiting w USING fit f WHERE f.may AND w.handle = f.handle RETURNING w.*
    )
    -- What it stood on, and how it was refused, stays with it: that is where it goes if it does not begin.
    INSERT INTO warp.running AS s (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, stamp, digest, host, claimed_at, token, settled, keys, ticket,
                                   parked_on, refusal)
    SELECT g.handle, g.due, p_now, g.lane, g.run + 1, g.attempt + 1, g.deaths, 4, g.is_unique, g.bytes, g.stamp, p_digests[array_position(p_lanes, g.lane)], p_host, p_now,
           nextval('warp.token'), g.settled, g.keys, g.ticket, g.parked_on, g.refusal
      FROM (SELECT * FROM gone ORDER BY gone.ticket) g
    RETURNING s.handle, s.token, s.run, s.attempt, s.lane, s.stamp, s.due;
    -- Whoever is the oldest now may have room, stamped with a larger limit.
    IF FOUND THEN
        PERFORM warp.hand_on(p_key, p_now);
    END IF;
END $$;

-- B8: a run that has not begun, as it stood before its claim: in its line, or ready. What the history says of that run,
-- that somebody wants it cancelled, it says of the job. Index: the primary key of audit.
CREATE OR REPLACE FUNCTION warp.unclaimed(INOUT p_row warp.state_row) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE warp.audit a SET run = 0, runs = a.runs - 1 WHERE a.job = p_row.handle AND a.run = p_row.run;
    p_row.place := CASE WHEN p_row.parked_on IS NULL THEN 1 ELSE 2 END;
    p_row.run := p_row.run - 1;
    p_row.attempt := p_row.attempt - 1;
    p_row.host := NULL;
    p_row.claimed_at := NULL;
END $$;

-- Every way out of a run and out of the line (C5): moves a row that the caller has taken out of its table to where
-- `p_exit` says, with history, counters, unique key and slots. Its key rows are locked.
-- p_exit: {"to": "completed", "result"} | {"to": "failed", "message", "reason"} | {"to": "deleted", "message"}
--   | {"to": "cancelled", "by"} | {"to": "retry", "message", "at"} | {"to": "snooze", "at"}
--   | {"to": "hand-back", "message"} | {"to": "rescued"} | {"to": "not-begun"}: it stands as `warp.unclaimed` has left it.
CREATE OR REPLACE FUNCTION warp.leave(p_row warp.state_row, p_exit jsonb, p_took bigint, p_now bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_to text := p_exit ->> 'to';
    v_message text := p_exit ->> 'message';
    v_at bigint := (p_exit ->> 'at')::bigint;
    was_running bool := p_row.place = 4;
    -- The key that it was woken for and has not tried (A7).
    v_woken_for bigint := CASE WHEN p_row.place = 1 THEN p_row.parked_on END;
    v_event smallint;
    v_error text;
    -- Whether it is charged, and whether its place in line is free for others.
    v_charged bool := true;
    v_new_turn bool := true;
    v_keeps bool := false;
    v_ticket bigint := p_row.ticket;
    v_run int := 0;
    v_host int;
    v_digest int;
BEGIN
    IF was_running THEN
        v_run := p_row.run;
        v_host := p_row.host;
        v_digest := p_row.digest;
        IF v_to <> 'completed' THEN
            INSERT INTO warp.audit (job, at, event, run, runs, host, digest)
            VALUES (p_row.handle, p_row.claimed_at, 2, v_run, v_run, v_host, v_digest);
        END IF;
    END IF;
    CASE v_to
    WHEN 'completed' THEN
        p_row.place := 10;
        PERFORM warp.count('stats:succeeded', NULL, 1);
        PERFORM warp.count('kept:completed', NULL, 1);
    WHEN 'failed' THEN
        p_row.place := 11;
        v_charged := p_exit ->> 'reason' <> 'recovery-exhausted';
        v_error := v_message;
        v_event := 4;
        PERFORM warp.count('stats:failed', p_exit ->> 'reason', 1);
        PERFORM warp.count('kept:failed', NULL, 1);
    WHEN 'deleted' THEN
        p_row.place := 12;
        v_event := 8;
        PERFORM warp.count('stats:deleted', NULL, 1);
        PERFORM warp.count('kept:deleted', NULL, 1);
    WHEN 'cancelled' THEN
        p_row.place := 12;
        v_event := 8;
        v_message := 'cancelled by ' || (p_exit ->> 'by');
        PERFORM warp.count('stats:deleted', 'cancelled', 1);
        PERFORM warp.count('kept:deleted', NULL, 1);
    WHEN 'retry' THEN
        p_row.place := CASE WHEN v_at > p_now THEN 0 ELSE 1 END;
        p_row.due := v_at;
        v_error := v_message;
        v_event := 4;
        PERFORM warp.count('stats:requeued', 'retry', 1);
    WHEN 'snooze' THEN
        p_row.place := CASE WHEN v_at > p_now THEN 0 ELSE 1 END;
        p_row.due := v_at;
        v_charged := false;
        v_event := CASE p_row.place WHEN 0 THEN 5 ELSE 6 END;
        v_message := 'snoozed';
        PERFORM warp.count('stats:requeued', 'snooze', 1);
    WHEN 'hand-back' THEN
        p_row.place := 1;
        v_charged := false;
        v_new_turn := false;
        v_event := 7;
        PERFORM warp.count('stats:requeued', 'hand-back', 1);
    WHEN 'not-begun' THEN
        v_new_turn := false;
    WHEN 'rescued' THEN
        p_row.place := 1;
        v_charged := false;
        v_new_turn := false;
        v_event := 7;
        v_message := 'its host died';
        PERFORM warp.count('stats:requeued', 'recovery', 1);
    END CASE;
    IF v_event IS NOT NULL THEN
        INSERT INTO warp.audit (job, at, event, run, runs, message, host, digest, took_us)
        VALUES (p_row.handle, p_now, v_event, v_run, p_row.run, v_message, v_host, v_digest, CASE WHEN was_running THEN p_took END);
    END IF;
    IF v_to = 'retry' THEN
        INSERT INTO warp.audit (job, at, event, run, runs, message)
        VALUES (p_row.handle, p_now, CASE p_row.place WHEN 0 THEN 5 ELSE 6 END, v_run, p_row.run, format('retry after attempt %s', p_row.attempt));
    END IF;
    IF was_running AND NOT v_charged THEN
        p_row.attempt := greatest(p_row.attempt - 1, 0);
    END IF;
    IF v_error IS NOT NULL OR p_exit ->> 'result' IS NOT NULL THEN
        INSERT INTO warp.outcome (job, result, error) VALUES (p_row.handle, p_exit ->> 'result', v_error)
        ON CONFLICT (job) DO UPDATE SET result = coalesce(excluded.result, outcome.result), error = coalesce(excluded.error, outcome.error);
    END IF;
    IF p_row.keys IS NOT NULL THEN
        SELECT p.is_fifo AND p.blocks INTO v_keeps FROM warp.policy p WHERE p.id = p_row.stamp;
    END IF;
    IF p_row.place >= 10 OR v_new_turn AND NOT v_keeps THEN
        p_row.ticket := NULL;
    END IF;
    IF v_to <> 'not-begun' THEN
        p_row.parked_on := NULL;
        p_row.refusal := NULL;
    END IF;
    p_row.token := NULL;
    p_row.changed_at := p_now;
    p_row.took_us := CASE WHEN was_running THEN p_took END;
    IF p_row.place >= 10 THEN
        IF p_row.is_unique THEN
            DELETE FROM warp.unique_key u WHERE u.job = p_row.handle;
            p_row.is_unique := false;
        END IF;
        IF v_to <> 'completed' THEN
            p_row.host := NULL;
        END IF;
        INSERT INTO warp.ended VALUES (p_row.*);
    ELSIF p_row.place IN (0, 2) THEN
        p_row.host := NULL;
        INSERT INTO warp.waiting VALUES (p_row.*);
    ELSE
        p_row.host := NULL;
        INSERT INTO warp.ready VALUES (p_row.*);
    END IF;
    IF p_row.keys IS NOT NULL THEN
        IF v_keeps AND v_ticket IS NOT NULL AND p_row.place < 10 THEN
            INSERT INTO warp.blocker (key, job, ticket) SELECT k, p_row.handle, v_ticket FROM unnest(p_row.keys) k ON CONFLICT DO NOTHING;
        ELSIF v_keeps AND NOT was_running THEN
            -- A start has ended the block already.
            PERFORM warp.unblock(p_row.handle, p_row.keys, p_now);
        END IF;
        PERFORM warp.release(p_row.handle, p_row.keys, p_now);
        IF v_woken_for IS NOT NULL AND warp.by_session() THEN
            PERFORM warp.session_wake_missing(v_woken_for, 1, 0, p_now);
        END IF;
    END IF;
END $$;
