-- Slots as session locks (slots.md A): what runs on a host's lock session, and what the rows do instead of the ledger.
--
-- The decisions of the host stand in `domain::session`, which the explorer drives against a model of the function
-- `session_call` below; its steps are numbered as there. All functions are VOLATILE and run under READ COMMITTED: each
-- query sees what was committed before *it* began (A2: a STABLE function would read the version of its beginning twice).
--
-- What must stay true: nothing here waits for an advisory lock of a slot; a row leaves the line only by a wake, a wake
-- never skips a locked row (A6), and no key row is locked by a claim, a settle, a park or a wake.

-- Whether this database's slots are session locks.
CREATE OR REPLACE FUNCTION warp.by_session() RETURNS bool LANGUAGE sql STABLE AS $$
    SELECT s.locks = 'session' FROM warp.setting s
$$;

-- The number of a lock: the first eight bytes of the SHA-256 of its name, as a signed number, high byte first. The
-- schema stands first in the name, and the slot's number before the key, because keys may end in `:7`. It must never
-- change, because hosts of two builds share the locks. Two names of one number share a lock: one of them waits for
-- nothing now and then, and nothing worse.
CREATE OR REPLACE FUNCTION warp.lock_number(p_key text, p_slot int) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x' || encode(substr(sha256(convert_to(
        'warp' || CASE WHEN p_slot IS NULL THEN ':warp:concurrency:' ELSE ':warp:slot:' || p_slot || ':' END || p_key, 'UTF8')), 1, 8), 'hex')
    )::bit(64)::bigint
$$;

-- Session locks that anybody holds, or with a backend only its own, by number. `pg_locks` shows a moment for each part of
-- the table: a lock that is held all the while is seen.
CREATE OR REPLACE FUNCTION warp.held_locks(p_numbers bigint[], p_backend int) RETURNS TABLE (number bigint, is_shared bool)
LANGUAGE sql VOLATILE AS $$
    SELECT l.number, l.mode = 'ShareLock'
      FROM (SELECT (l.classid::bigint << 32) | l.objid::bigint AS number, l.mode
              FROM pg_catalog.pg_locks l
             WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND (p_backend IS NULL OR l.pid = p_backend)
               AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())) l
     WHERE p_numbers IS NULL OR l.number = ANY (p_numbers)
$$;

-- What a lock session does next, in this order: {"keep": [[kind, key, slot]] or null, "unlocks": [[kind, key, slot]],
-- "converts": [key], "asks": [[[key, stamped limit, has base, [own slots], has the whole key]]]}; kind: 0 the whole key, 1 its base, 2 a slot.
-- Answers {"unheld": [key], "converted": [[key, admin limit, version]], "replies": [[0, fence, [[slot, admin limit,
-- version]]] | [1, place, limit] | [2]]}: admitted, refused, or a limit kept changing.
-- Primary key of conc_key. No row is locked.
CREATE OR REPLACE FUNCTION warp.session_call(p_call jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_item jsonb;
    v_ask jsonb;
    v_unheld jsonb := '[]';
    v_converted jsonb := '[]';
    v_replies jsonb := '[]';
    v_grants jsonb;
    v_key record;
    v_base bigint;
    v_number bigint;
    v_kept bigint[];
    v_kept_shared bigint[];
    -- What earlier attempts of this call have: bases by mode, and slots (A1).
    v_wholes bigint[] := '{}';
    v_bases bigint[] := '{}';
    v_slots bigint[] := '{}';
    -- What the attempt at hand has taken.
    v_taken bigint[];
    v_taken_shared bool[];
    v_limit int;
    v_below int;
    v_slot int;
    v_start int;
    v_got int;
    v_held int[];
    v_version bigint;
    v_place int;
    v_refused int;
    v_changed bool;
    v_done bool;
BEGIN
    -- A13: an earlier call failed. What this backend has and is not to keep goes back, as often as it has it.
    IF jsonb_typeof(p_call -> 'keep') = 'array' THEN
        SELECT coalesce(array_agg(warp.lock_number(c.key, CASE WHEN k -> 0 = '2' THEN (k ->> 2)::int END)) FILTER (WHERE k -> 0 <> '1'), '{}'),
               coalesce(array_agg(warp.lock_number(c.key, NULL)) FILTER (WHERE k -> 0 = '1'), '{}')
          INTO v_kept, v_kept_shared
          FROM jsonb_array_elements(p_call -> 'keep') k JOIN warp.conc_key c ON c.id = (k ->> 1)::bigint;
        LOOP
            v_got := 0;
            FOR v_key IN SELECT h.number, h.is_shared FROM warp.held_locks(NULL, pg_backend_pid()) h
                          WHERE NOT h.number = ANY (CASE WHEN h.is_shared THEN v_kept_shared ELSE v_kept END) LOOP
                v_got := v_got + 1;
                IF v_key.is_shared THEN
                    PERFORM pg_advisory_unlock_shared(v_key.number);
                ELSE
                    PERFORM pg_advisory_unlock(v_key.number);
                END IF;
            END LOOP;
            EXIT WHEN v_got = 0;
        END LOOP;
    END IF;

    FOR v_item IN SELECT u FROM jsonb_array_elements(p_call -> 'unlocks') u LOOP
        SELECT c.key INTO v_key FROM warp.conc_key c WHERE c.id = (v_item ->> 1)::bigint;
        v_done := CASE v_item ->> 0
            WHEN '0' THEN pg_advisory_unlock(warp.lock_number(v_key.key, NULL))
            WHEN '1' THEN pg_advisory_unlock_shared(warp.lock_number(v_key.key, NULL))
            ELSE pg_advisory_unlock(warp.lock_number(v_key.key, (v_item ->> 2)::int)) END;
        IF v_done IS NOT TRUE THEN
            v_unheld := v_unheld || jsonb_build_array(v_key.key);
        END IF;
    END LOOP;

    -- A11. Nobody else can have the base or a slot while the whole key is held. Begun again, it takes what is missing.
    FOR v_item IN SELECT c FROM jsonb_array_elements(p_call -> 'converts') c LOOP
        SELECT c.key INTO v_key FROM warp.conc_key c WHERE c.id = (v_item #>> '{}')::bigint;
        v_base := warp.lock_number(v_key.key, NULL);
        v_number := warp.lock_number(v_key.key, 0);
        IF NOT EXISTS (SELECT FROM warp.held_locks(array[v_base], pg_backend_pid()) h WHERE h.is_shared) THEN
            PERFORM pg_try_advisory_lock_shared(v_base);
        END IF;
        IF NOT EXISTS (SELECT FROM warp.held_locks(array[v_number], pg_backend_pid()) h) THEN
            PERFORM pg_try_advisory_lock(v_number);
        END IF;
        IF EXISTS (SELECT FROM warp.held_locks(array[v_base], pg_backend_pid()) h WHERE NOT h.is_shared) THEN
            PERFORM pg_advisory_unlock(v_base);
        END IF;
        SELECT v_converted || jsonb_build_array(jsonb_build_array(c.id, c.admin_limit, c.version)) INTO v_converted
          FROM warp.conc_key c WHERE c.id = (v_item #>> '{}')::bigint;
    END LOOP;

    FOR v_ask IN SELECT a FROM jsonb_array_elements(p_call -> 'asks') a LOOP
        v_done := false;
        FOR v_try IN 1 .. 16 LOOP
            v_taken := '{}';
            v_taken_shared := '{}';
            v_grants := '[]';
            v_refused := NULL;
            v_changed := false;
            v_place := 0;
            FOR v_item IN SELECT s FROM jsonb_array_elements(v_ask) s LOOP
                -- Step 1: a fresh snapshot. A stamped limit is in `high` since its claim.
                SELECT c.key, c.admin_limit, c.high, c.version INTO v_key FROM warp.conc_key c WHERE c.id = (v_item ->> 0)::bigint;
                v_limit := least(coalesce(v_key.admin_limit, greatest((v_item ->> 1)::int, 1)), v_key.high);
                v_base := warp.lock_number(v_key.key, NULL);
                v_got := NULL;
                IF v_limit <= 1 THEN
                    -- Step 2, exclusive: refused beside anything of our own, which the server would grant (A1). What is got
                    -- is not verified: nobody else is in, and a raise finds its holder (A11).
                    IF v_limit = 1 AND NOT (v_item ->> 4)::bool AND jsonb_array_length(v_item -> 3) = 0 AND NOT v_base = ANY (v_wholes) AND NOT v_base = ANY (v_bases)
                       AND pg_try_advisory_lock(v_base) THEN
                        v_taken := v_taken || v_base;
                        v_taken_shared := v_taken_shared || false;
                        v_got := -1;
                    END IF;
                ELSIF NOT (v_item ->> 4)::bool AND NOT v_base = ANY (v_wholes)
                      AND ((v_item ->> 2)::bool OR v_base = ANY (v_bases) OR pg_try_advisory_lock_shared(v_base)) THEN
                    IF NOT (v_item ->> 2)::bool AND NOT v_base = ANY (v_bases) THEN
                        v_taken := v_taken || v_base;
                        v_taken_shared := v_taken_shared || true;
                    END IF;
                    v_below := v_limit;
                    IF v_key.high > v_limit THEN
                        -- Step 3: the largest number of slots that may be tried, so that with those held above it there are
                        -- no more holders than the limit. Takers stay below it, so what is held above only falls.
                        SELECT coalesce(array_agg(n.n), '{}') INTO v_held
                          FROM generate_series(0, v_key.high - 1) n (n)
                          JOIN (SELECT h.number FROM warp.held_locks(
                                    array(SELECT warp.lock_number(v_key.key, a) FROM generate_series(0, v_key.high - 1) a), NULL) h) h
                            ON h.number = warp.lock_number(v_key.key, n.n);
                        WHILE v_below > 0 AND v_below + (SELECT count(*) FROM unnest(v_held) n WHERE n >= v_below) > v_limit LOOP
                            v_below := v_below - 1;
                        END LOOP;
                    END IF;
                    -- Step 4: from a random start.
                    v_start := floor(random() * v_below)::int;
                    FOR v_at IN 0 .. v_below - 1 LOOP
                        v_slot := (v_start + v_at) % v_below;
                        v_number := warp.lock_number(v_key.key, v_slot);
                        CONTINUE WHEN (v_item -> 3) @> to_jsonb(v_slot) OR v_number = ANY (v_slots);
                        IF pg_try_advisory_lock(v_number) THEN
                            v_taken := v_taken || v_number;
                            v_taken_shared := v_taken_shared || false;
                            v_got := v_slot;
                            EXIT;
                        END IF;
                    END LOOP;
                    IF v_got IS NOT NULL THEN
                        -- Step 5: a new snapshot, after the lock.
                        SELECT c.version INTO v_version FROM warp.conc_key c WHERE c.id = (v_item ->> 0)::bigint;
                        v_changed := v_version <> v_key.version;
                    END IF;
                END IF;
                IF v_got IS NULL THEN
                    v_refused := v_limit;
                END IF;
                EXIT WHEN v_got IS NULL OR v_changed;
                v_grants := v_grants || jsonb_build_array(jsonb_build_array(nullif(v_got, -1), v_key.admin_limit, v_key.version));
                v_place := v_place + 1;
            END LOOP;
            IF v_refused IS NULL AND NOT v_changed THEN
                -- Step 6: drawn after the locks.
                v_replies := v_replies || jsonb_build_array(jsonb_build_array(0, nextval('warp.token') * 256, v_grants));
                FOR v_at IN 1 .. cardinality(v_taken) LOOP
                    -- A shared lock is a base; an exclusive one is a whole key or a slot, and no name is both.
                    IF v_taken_shared[v_at] THEN
                        v_bases := v_bases || v_taken[v_at];
                    ELSE
                        v_wholes := v_wholes || v_taken[v_at];
                        v_slots := v_slots || v_taken[v_at];
                    END IF;
                END LOOP;
                v_done := true;
                EXIT;
            END IF;
            -- A3: all or none.
            FOR v_at IN REVERSE cardinality(v_taken) .. 1 LOOP
                IF v_taken_shared[v_at] THEN
                    PERFORM pg_advisory_unlock_shared(v_taken[v_at]);
                ELSE
                    PERFORM pg_advisory_unlock(v_taken[v_at]);
                END IF;
            END LOOP;
            IF v_refused IS NOT NULL THEN
                v_replies := v_replies || jsonb_build_array(jsonb_build_array(1, v_place, v_refused));
                v_done := true;
                EXIT;
            END IF;
        END LOOP;
        IF NOT v_done THEN
            v_replies := v_replies || '[[2]]'::jsonb;
        END IF;
    END LOOP;
    RETURN jsonb_build_object('unheld', v_unheld, 'converted', v_converted, 'replies', v_replies)::text;
END $$;

-- How many jobs with a key are ready or running (A6, A14). Rows in `ready` that were not woken for it have not tried it, or
-- are not known to need it; leaving them out wakes one too many at the worst. The running rows of all hosts; ready_woken.
CREATE OR REPLACE FUNCTION warp.session_active(p_key bigint) RETURNS int LANGUAGE sql VOLATILE AS $$
    SELECT ((SELECT count(*) FROM warp.running r WHERE r.keys @> array[p_key])
          + (SELECT count(*) FROM warp.ready r WHERE r.parked_on = p_key))::int
$$;

-- Wakes so many of those parked on a key, oldest first; how many it were. Whose lane nobody may claim from is passed over
-- (A14). The limit stands above the row locks, and no locked row is skipped (A6): one that is on its way out is waited for
-- and another found. Index: waiting_parked in its order.
CREATE OR REPLACE FUNCTION warp.session_wake(p_key bigint, p_count int, p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    IF p_count <= 0 THEN
        RETURN 0;
    END IF;
    WITH woken AS (
        DELETE FROM warp.waiting w WHERE w.handle = ANY (array(
            SELECT o.handle FROM warp.waiting o
             WHERE o.place = 2 AND o.parked_on = p_key AND EXISTS (SELECT FROM warp.claimable_lane a WHERE a.lane = o.lane)
             ORDER BY o.ticket LIMIT p_count FOR UPDATE OF o)) AND w.place = 2
        RETURNING *
    )
    INSERT INTO warp.ready
    SELECT w.handle, w.due, p_now, w.lane, w.run, w.attempt, w.deaths, 1, w.is_unique, w.bytes, w.explicit, w.stamp, w.digest, w.host,
           w.claimed_at, w.took_us, w.token, w.settled, w.keys, w.ticket, w.parked_on, w.refusal FROM woken w;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- The limit that counts for wakes: the operator's, else the highest that was ever stamped.
CREATE OR REPLACE FUNCTION warp.session_limit(p_key bigint) RETURNS int LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(c.admin_limit, c.high) FROM warp.conc_key c WHERE c.id = p_key
$$;

-- A6: wakes what is missing to the limit, and where a lock was given back at least one; `p_room` more, whom the host that
-- asks serves inside itself.
CREATE OR REPLACE FUNCTION warp.session_wake_missing(p_key bigint, p_at_least int, p_room int, p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_limit int := warp.session_limit(p_key);
BEGIN
    -- A paused key starts nobody.
    IF v_limit = 0 THEN
        RETURN 0;
    END IF;
    RETURN warp.session_wake(p_key, greatest(p_at_least, v_limit + p_room - warp.session_active(p_key)), p_now);
END $$;

-- A4: looks at keys on which jobs were parked, by statements that are committed, and wakes as many as it sees slots free. The
-- look takes no lock. How many were woken.
CREATE OR REPLACE FUNCTION warp.session_look(p_keys bigint[], p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_look record;
    v_woken int := 0;
BEGIN
    FOR v_look IN
        SELECT k.id, k.lim, count(h.number) FILTER (WHERE n.slot IS NULL AND NOT h.is_shared) AS wholes,
               count(h.number) FILTER (WHERE n.slot IS NULL) AS bases,
               count(DISTINCT n.slot) FILTER (WHERE h.number IS NOT NULL) AS slots
          FROM (SELECT c.id, c.key, c.high, coalesce(c.admin_limit, c.high) AS lim FROM warp.conc_key c WHERE c.id = ANY (p_keys)) k
         CROSS JOIN LATERAL (SELECT NULL::int AS slot UNION ALL SELECT generate_series(0, k.high - 1)) n
          LEFT JOIN (SELECT * FROM warp.held_locks(NULL, NULL)) h ON h.number = warp.lock_number(k.key, n.slot)
         GROUP BY k.id, k.lim ORDER BY k.id
    LOOP
        v_woken := v_woken + warp.session_wake(v_look.id, CASE
            WHEN v_look.wholes > 0 THEN 0
            WHEN v_look.lim = 1 THEN (v_look.bases = 0)::int
            ELSE v_look.lim - v_look.slots::int END, v_now);
    END LOOP;
    PERFORM warp.announce_keys(p_keys);
    RETURN v_woken;
END $$;

-- A10: after a limit has changed, and that is committed.
CREATE OR REPLACE FUNCTION warp.session_limit_changed(p_key text, p_now bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_key bigint;
    v_woken int;
BEGIN
    SELECT c.id INTO v_key FROM warp.conc_key c WHERE c.key = p_key;
    v_woken := warp.session_wake_missing(v_key, 0, 0, coalesce(p_now, warp.clock()));
    PERFORM warp.announce_keys(array[v_key]);
    RETURN v_woken;
END $$;

-- A14: after faults. Keys with parked jobs and fewer ready and running ones than their limit; how many were woken. Walks
-- from key to key along waiting_parked, however long their lines are.
CREATE OR REPLACE FUNCTION warp.session_sweep(p_now bigint) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off
AS $$
DECLARE
    v_key bigint := -9223372036854775808;
    v_keys bigint[] := '{}';
    v_woken int := 0;
    v_more int;
BEGIN
    FOR v_at IN 1 .. 10000 LOOP
        SELECT w.parked_on INTO v_key FROM warp.waiting w WHERE w.place = 2 AND w.parked_on > v_key ORDER BY w.parked_on LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_more := warp.session_wake_missing(v_key, 0, 0, p_now);
        IF v_more > 0 THEN
            v_woken := v_woken + v_more;
            v_keys := v_keys || v_key;
        END IF;
    END LOOP;
    PERFORM warp.announce_keys(v_keys);
    RETURN v_woken;
END $$;

-- Who holds a key, for the history of a job that was refused there: of the host whose session has the lock, the run that was
-- claimed first and is not refused with it. A lock outlives its holder's row, from the commit of the end to the unlock, and
-- may be gone by now: then it is who ended last with the key, if that is among the last few hundred ends of its lane; else whoever runs
-- with it, or NULL. The locks; the running rows of all hosts; ended_at backwards, so far and no further; primary key of job.
CREATE OR REPLACE FUNCTION warp.session_holder(p_key bigint, p_parks jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_refused bigint[] := array(SELECT (p ->> 1)::bigint FROM jsonb_array_elements(p_parks) p);
    v_job bigint;
BEGIN
    SELECT r.handle INTO v_job
      FROM warp.conc_key c
      JOIN pg_catalog.pg_locks l ON (l.classid::bigint << 32) | l.objid::bigint = warp.lock_number(c.key, NULL)
      JOIN warp.host h ON h.lock_backend = l.pid
      JOIN warp.running r ON r.host = h.id
     WHERE c.id = p_key AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
       AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
       AND r.keys @> array[p_key] AND r.token <> ALL (v_refused) ORDER BY r.token LIMIT 1;
    IF NOT FOUND THEN
        -- `settled` is the token of a run; whoever was skipped itself has none.
        SELECT e.handle INTO v_job
          FROM (VALUES (10::smallint), (11::smallint), (12::smallint)) k (place) CROSS JOIN warp.lane l
         CROSS JOIN LATERAL (
                SELECT o.handle, o.changed_at, o.settled, o.keys FROM warp.ended o WHERE o.place = k.place AND o.lane = l.id
                 ORDER BY o.changed_at DESC LIMIT 512) e
         WHERE e.keys @> array[p_key] AND e.settled IS NOT NULL ORDER BY e.changed_at DESC, e.settled DESC LIMIT 1;
    END IF;
    IF v_job IS NULL THEN
        SELECT r.handle INTO v_job FROM warp.running r
         WHERE r.keys @> array[p_key] AND r.token <> ALL (v_refused) ORDER BY r.token LIMIT 1;
    END IF;
    RETURN (SELECT j.id::text FROM warp.job j WHERE j.handle = v_job);
END $$;

-- A4: attempts that their lock session refused leave `running`: to the line or, where that is their last word, to the ended
-- ones. [[job, token, key, limit, skips]]. What comes too late matches no row (C1). {parked, had been parked before, skipped}.
-- Primary key of running.
CREATE OR REPLACE FUNCTION warp.session_park(p_host int, p_parks jsonb, p_now bigint) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_park jsonb;
    v_row warp.state_row;
    v_text text;
    v_by text;
    v_holder text;
    v_parked int := 0;
    v_again int := 0;
    v_skipped int := 0;
BEGIN
    FOR v_park IN SELECT p FROM jsonb_array_elements(p_parks) p ORDER BY (p ->> 0)::bigint LOOP
        DELETE FROM warp.running r WHERE r.host = p_host AND r.handle = (v_park ->> 0)::bigint AND r.token = (v_park ->> 1)::bigint
            RETURNING * INTO v_row;
        CONTINUE WHEN NOT FOUND;
        v_by := warp.take_cancellation(v_row);
        -- It has not run: this start does not count.
        v_row.run := v_row.run - 1;
        v_row.attempt := v_row.attempt - 1;
        v_row.host := NULL;
        v_row.token := NULL;
        v_row.digest := NULL;
        v_row.changed_at := p_now;
        SELECT format('''%s'' %s', c.key, CASE WHEN v_park -> 3 = '0' THEN 'paused (0 slots)' ELSE format('full (%s slots)', v_park ->> 3) END)
          INTO v_text FROM warp.conc_key c WHERE c.id = (v_park ->> 2)::bigint;
        IF v_by IS NOT NULL THEN
            v_row.place := 2;
            PERFORM warp.leave(v_row, jsonb_build_object('to', 'cancelled', 'by', v_by), NULL, p_now);
        ELSIF (v_park ->> 4)::bool THEN
            v_holder := warp.session_holder((v_park ->> 2)::bigint, p_parks);
            v_skipped := v_skipped + 1;
            v_row.place := 12;
            IF v_row.is_unique THEN
                DELETE FROM warp.unique_key u WHERE u.job = v_row.handle;
                v_row.is_unique := false;
            END IF;
            INSERT INTO warp.ended VALUES (v_row.*);
            INSERT INTO warp.audit (job, at, event, run, runs, message)
            VALUES (v_row.handle, p_now, 8, 0, v_row.run, format('Cancelled — %s, held by %s', v_text, coalesce(v_holder, 'a run that has just ended')));
            PERFORM warp.count('stats:deleted', 'skip', 1);
            PERFORM warp.count('kept:deleted', NULL, 1);
        ELSE
            v_parked := v_parked + 1;
            v_row.place := 2;
            v_row.ticket := coalesce(v_row.ticket, nextval('warp.ticket'));
            v_row.parked_on := (v_park ->> 2)::bigint;
            IF v_row.refusal IS NULL THEN
                -- The history hears of the first time only: the rest is one wait.
                INSERT INTO warp.audit (job, at, event, run, runs, message)
                VALUES (v_row.handle, p_now, 7, 0, v_row.run, 'Requeued — ' || v_text);
                PERFORM warp.count('stats:requeued', 'concurrency', 1);
            ELSE
                v_again := v_again + 1;
            END IF;
            v_row.refusal := v_text;
            INSERT INTO warp.waiting VALUES (v_row.*);
        END IF;
    END LOOP;
    RETURN array[v_parked, v_again, v_skipped];
END $$;

-- What a host owes to the rows, in a statement of its own: parks, and wakes [[key, at least, room]]. {parked, again, skipped}.
CREATE OR REPLACE FUNCTION warp.session_owed(p_host int, p_parks jsonb, p_wakes jsonb, p_now bigint) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_counts int[];
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('warp.host'), p_host);
    v_counts := warp.session_park(p_host, p_parks, v_now);
    PERFORM warp.session_wakes(p_wakes, v_now);
    PERFORM warp.announce_keys(array(SELECT (w ->> 0)::bigint FROM jsonb_array_elements(p_wakes) w));
    RETURN v_counts;
END $$;

-- [[key, at least, room]], in the order of keys.
CREATE OR REPLACE FUNCTION warp.session_wakes(p_wakes jsonb, p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_wake jsonb;
BEGIN
    FOR v_wake IN SELECT w FROM jsonb_array_elements(p_wakes) w ORDER BY (w ->> 0)::bigint LOOP
        PERFORM warp.session_wake_missing((v_wake ->> 0)::bigint, (v_wake ->> 1)::int, (v_wake ->> 2)::int, p_now);
    END LOOP;
END $$;

-- The claim of a keyed job: it runs, and its host then asks for its keys. One that waits, has a single key and was not just
-- woken is parked at once where more than the limit, and the room that its host has inside, are running (A4). `p_room`:
-- [[key, room]]. Like warp.admit otherwise. No lock; the running rows of all hosts, conc_key's primary key.
CREATE OR REPLACE FUNCTION warp.session_admit(
    INOUT p_row warp.state_row, p_has_started bool, p_host int, p_digest int, p_now bigint, p_room jsonb,
    OUT verdict smallint, OUT again bool, OUT fills bool
) LANGUAGE plpgsql AS $$
DECLARE
    v_policy record;
    v_key record;
    v_limit int;
    v_room int;
BEGIN
    SELECT greatest(p.slots, 1) AS slots, p.skips INTO v_policy FROM warp.policy p WHERE p.id = p_row.stamp;
    again := p_row.refusal IS NOT NULL;
    -- A2, step 1: a stamped limit is on record before anybody takes a slot under it. Nearly always it is.
    IF v_policy.slots > 1 AND EXISTS (SELECT FROM warp.conc_key c WHERE c.id = ANY (p_row.keys) AND c.high < v_policy.slots) THEN
        PERFORM warp.lock_keys(p_row.keys);
        UPDATE warp.conc_key c SET high = v_policy.slots, version = c.version + 1 WHERE c.id = ANY (p_row.keys) AND c.high < v_policy.slots;
    END IF;
    IF cardinality(p_row.keys) = 1 AND p_row.parked_on IS NULL AND (NOT v_policy.skips OR p_has_started) THEN
        SELECT c.key, coalesce(c.admin_limit, v_policy.slots) AS lim INTO v_key FROM warp.conc_key c WHERE c.id = p_row.keys[1];
        SELECT (r ->> 1)::int INTO v_room FROM jsonb_array_elements(p_room) r WHERE (r ->> 0)::bigint = p_row.keys[1];
        v_limit := v_key.lim + CASE WHEN v_key.lim > 0 THEN coalesce(v_room, 0) ELSE 0 END;
        IF (SELECT count(*) FROM warp.running r WHERE r.keys @> p_row.keys) >= v_limit THEN
            p_row.ticket := coalesce(p_row.ticket, nextval('warp.ticket'));
            p_row.place := 2;
            p_row.parked_on := p_row.keys[1];
            p_row.changed_at := p_now;
            IF p_row.refusal IS NULL THEN
                INSERT INTO warp.audit (job, at, event, run, runs, message)
                VALUES (p_row.handle, p_now, 7, 0, p_row.run, format('Requeued — ''%s'' %s', v_key.key, CASE WHEN v_key.lim = 0
                        THEN 'paused (0 slots)' ELSE format('full (%s slots)', v_key.lim) END));
                PERFORM warp.count('stats:requeued', 'concurrency', 1);
            END IF;
            p_row.refusal := format('''%s'' %s', v_key.key, CASE WHEN v_key.lim = 0 THEN 'paused (0 slots)' ELSE format('full (%s slots)', v_key.lim) END);
            INSERT INTO warp.waiting VALUES (p_row.*);
            fills := true;
            verdict := 2;
            RETURN;
        END IF;
    END IF;
    p_row.token := nextval('warp.token');
    p_row.place := 4;
    p_row.run := p_row.run + 1;
    p_row.attempt := p_row.attempt + 1;
    p_row.host := p_host;
    p_row.digest := p_digest;
    p_row.claimed_at := p_now;
    p_row.changed_at := p_now;
    p_row.took_us := NULL;
    -- Its ticket and what refused it stay: it may have to go back into the line.
    p_row.parked_on := NULL;
    INSERT INTO warp.running VALUES (p_row.*);
    verdict := 1;
END $$;

-- A12: the backend of a host's lock session, told with each new one.
CREATE OR REPLACE FUNCTION warp.session_is(p_host int, p_backend int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE warp.host h SET lock_backend = p_backend WHERE h.id = p_host;
END $$;

-- A12: ends a host's lock session, if that backend is still one of this schema's hosts. Needs to be the same role, or a member
-- of pg_signal_backend; without the right nothing happens, and keys of a frozen host stay taken until its session ends.
CREATE OR REPLACE FUNCTION warp.end_session(p_backend int) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity a
             WHERE a.pid = p_backend AND a.datname = current_database() AND a.application_name LIKE '%:warp-locks');
EXCEPTION WHEN insufficient_privilege THEN
    RETURN false;
END $$;
