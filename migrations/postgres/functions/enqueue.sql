-- Writing new jobs: for the driver, for the children of a run, and for anybody inside a transaction of his own.
--
-- What must stay true: a job and its one state row are written together; unique keys are taken in the order of their
-- bytes and before job ids, so that two batches never wait for each other in a circle; whoever makes a job runnable
-- announces its queue with the commit, or tells its caller that this is left to him.
--
-- What it deliberately does not do: render keys. A key whose field is missing fails its job at the first claim.

-- Milliseconds since 1970 on the server's clock, now and not when the transaction began.
CREATE OR REPLACE FUNCTION warp.clock() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- Tells the hosts of these lanes' queues that there is something to look for, once the transaction has committed.
-- Index: primary key of lane.
CREATE OR REPLACE FUNCTION warp.announce(p_lanes int[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('warp', q.queue)
       FROM (SELECT DISTINCT l.queue FROM warp.lane l WHERE l.id = ANY (p_lanes)) q;
END $$;

-- The same for what this transaction has reserved or woken on these keys. Index: ready_woken.
CREATE OR REPLACE FUNCTION warp.announce_keys(p_keys bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM warp.announce(array(
        SELECT DISTINCT r.lane FROM warp.ready r
         WHERE r.parked_on = ANY (p_keys) AND r.xmin = pg_current_xact_id()::xid));
END $$;

-- Numbers of names, drawn for new ones. What is there already is read without a lock; new rows are inserted in one order,
-- and whoever inserts the same at the same moment waits for the other's commit. Unique indexes of each table.
CREATE OR REPLACE FUNCTION warp.lane_ids(p_contracts text[], p_queues text[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_ids int[];
BEGIN
    LOOP
        SELECT array_agg(l.id ORDER BY n.at) INTO v_ids
          FROM unnest(p_contracts, p_queues) WITH ORDINALITY n (contract, queue, at)
          LEFT JOIN warp.lane l ON l.contract = n.contract AND l.queue = n.queue;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO warp.lane (contract, queue)
        SELECT DISTINCT n.contract COLLATE "C", n.queue COLLATE "C" FROM unnest(p_contracts, p_queues) n (contract, queue)
         WHERE NOT EXISTS (SELECT FROM warp.lane l WHERE l.contract = n.contract AND l.queue = n.queue)
         ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- The same for a claim, which must not wait for a caller who has mentioned a contract for the first time and not committed:
-- 0 for such a lane. There is nothing to be claimed in it before that commit.
CREATE OR REPLACE FUNCTION warp.lane_ids_to_claim(p_contracts text[], p_queues text[]) RETURNS int[] LANGUAGE plpgsql
SET lock_timeout = '20ms'
AS $$
DECLARE
    v_ids int[] := '{}';
BEGIN
    FOR v_at IN 1 .. cardinality(p_contracts) LOOP
        BEGIN
            v_ids := v_ids || warp.lane_ids(p_contracts[v_at : v_at], p_queues[v_at : v_at]);
        EXCEPTION WHEN lock_not_available THEN
            v_ids := v_ids || 0;
        END;
    END LOOP;
    RETURN v_ids;
END $$;

-- A policy by its canonical text. The rules of the concurrency family are put beside it.
CREATE OR REPLACE FUNCTION warp.policy_ids(p_bodies text[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_ids int[];
BEGIN
    LOOP
        SELECT array_agg(p.id ORDER BY n.at) INTO v_ids
          FROM unnest(p_bodies) WITH ORDINALITY n (body, at)
          LEFT JOIN warp.policy p ON p.hash = sha256(convert_to(n.body, 'UTF8'));
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO warp.policy (hash, body, slots, weight, skips, is_fifo, blocks)
        SELECT DISTINCT ON (1) sha256(convert_to(n.body, 'UTF8')), n.body,
               -- More than the column holds is as good as no limit.
               least((c.rules ->> 'limit')::bigint, 2147483647)::int, least((c.rules ->> 'weight')::bigint, 2147483647)::int,
               c.rules ->> 'mode' = 'skip', c.rules ->> 'order' = 'fifo', c.rules ->> 'on_retry' = 'block'
          FROM unnest(p_bodies) n (body) CROSS JOIN LATERAL (SELECT n.body::jsonb -> 'concurrency' -> 0) c (rules)
         WHERE NOT EXISTS (SELECT FROM warp.policy p WHERE p.hash = sha256(convert_to(n.body, 'UTF8')))
         ORDER BY 1 ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

CREATE OR REPLACE FUNCTION warp.digest_ids(p_digests bytea[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_ids int[];
BEGIN
    LOOP
        SELECT array_agg(d.id ORDER BY n.at) INTO v_ids
          FROM unnest(p_digests) WITH ORDINALITY n (sha256, at) LEFT JOIN warp.digest d ON d.sha256 = n.sha256;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO warp.digest (sha256)
        SELECT DISTINCT n.sha256 FROM unnest(p_digests) n (sha256)
         WHERE NOT EXISTS (SELECT FROM warp.digest d WHERE d.sha256 = n.sha256)
         ORDER BY 1 ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- Concurrency keys by their text. Called before the exchange that needs them, in a transaction of its own: a key's number
-- is its place in the one global order of keys (C4), and nobody may wait for it while he holds others.
CREATE OR REPLACE FUNCTION warp.key_ids(p_keys text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_ids bigint[];
BEGIN
    LOOP
        SELECT array_agg(c.id ORDER BY n.at) INTO v_ids
          FROM unnest(p_keys) WITH ORDINALITY n (key, at) LEFT JOIN warp.conc_key c ON c.key = n.key;
        EXIT WHEN array_position(v_ids, NULL) IS NULL;
        INSERT INTO warp.conc_key (key)
        SELECT DISTINCT n.key COLLATE "C" FROM unnest(p_keys) n (key)
         WHERE NOT EXISTS (SELECT FROM warp.conc_key c WHERE c.key = n.key)
         ORDER BY 1 ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_ids;
END $$;

-- The state rows of new jobs, announced. What is due later goes to `waiting`. Hosts know the next due time, so of those
-- only an earlier one is news. A host forgets a due time when it activates what was due, perhaps at this very moment, so
-- what is due within a second does not count as known; and nothing does where the caller's transaction may go on for long
-- (`p_lasts`). Lanes that its caller wants to announce himself (`p_quiet`), later and many at once, are not announced but
-- answered, if they have news. Locks nothing but its own new rows. Index: waiting_due for the next due time.
CREATE OR REPLACE FUNCTION warp.write_states(
    p_handles bigint[], p_lanes int[], p_explicits int[], p_payloads text[], p_dues bigint[], p_unique_keys text[],
    p_now bigint, p_lasts bool, p_quiet int[]
) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
    v_first bigint;
    v_known bigint;
    v_news int[];
    v_unsaid int[] := '{}';
BEGIN
    INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, explicit)
    SELECT n.handle, coalesce(n.due, p_now), p_now, n.lane, 0, 0, 0, 1, n.unique_key IS NOT NULL,
           CASE WHEN octet_length(n.payload) > 16384 THEN octet_length(n.payload) END, n.explicit
      FROM unnest(p_handles, p_lanes, p_explicits, p_payloads, p_dues, p_unique_keys) n (handle, lane, explicit, payload, due, unique_key)
     WHERE n.due IS NULL OR n.due <= p_now;
    v_news := array(SELECT DISTINCT n.lane FROM unnest(p_lanes, p_dues) n (lane, due) WHERE n.due IS NULL OR n.due <= p_now);
    SELECT min(n.due) INTO v_first FROM unnest(p_dues) n (due) WHERE n.due > p_now;
    IF v_first IS NOT NULL THEN
        IF NOT p_lasts THEN
            SELECT min(w.due) INTO v_known FROM warp.waiting w WHERE w.place = 0 AND w.due > p_now + 1000;
        END IF;
        v_news := v_news || array(
            SELECT DISTINCT n.lane FROM unnest(p_lanes, p_dues) n (lane, due)
             WHERE n.due > p_now AND (v_known IS NULL OR n.due < v_known));
    END IF;
    IF cardinality(p_quiet) > 0 THEN
        v_unsaid := array(SELECT DISTINCT n.lane FROM unnest(v_news) n (lane) WHERE n.lane = ANY (p_quiet));
        v_news := array(SELECT n.lane FROM unnest(v_news) n (lane) WHERE n.lane <> ALL (p_quiet));
    END IF;
    IF cardinality(v_news) > 0 THEN
        PERFORM warp.announce(v_news);
    END IF;
    IF v_first IS NULL THEN
        RETURN v_unsaid;
    END IF;
    INSERT INTO warp.waiting (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, explicit)
    SELECT n.handle, n.due, p_now, n.lane, 0, 0, 0, 0, n.unique_key IS NOT NULL,
           CASE WHEN octet_length(n.payload) > 16384 THEN octet_length(n.payload) END, n.explicit
      FROM unnest(p_handles, p_lanes, p_explicits, p_payloads, p_dues, p_unique_keys) n (handle, lane, explicit, payload, due, unique_key)
     WHERE n.due > p_now;
    RETURN v_unsaid;
END $$;

-- Writes jobs none of which stands in the way of another: no id twice. Each first takes its unique key. `taken`: for each
-- that was not written, which job is in its way; `unsaid`: lanes of `p_quiet` that are to be announced.
-- Indexes: job_id, primary keys of unique_key and job.
CREATE OR REPLACE FUNCTION warp.enqueue_apart(
    p_ids uuid[], p_lanes int[], p_explicits int[], p_payloads text[], p_metadata text[], p_trace_parents text[],
    p_dues bigint[], p_unique_keys text[], p_now bigint, p_quiet int[] DEFAULT '{}',
    OUT taken uuid[], OUT unsaid int[]
) LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    v_handles bigint[] := array(SELECT nextval('warp.handle') FROM generate_subscripts(p_ids, 1));
    v_taken uuid[];
    v_is_open bool;
    v_written bigint[];
    v_lanes int[];
    v_explicits int[];
    v_payloads text[];
    v_dues bigint[];
    v_unique_keys text[];
BEGIN
    -- The id first: a repeat of the very same call finds its own unique key taken by itself.
    SELECT array_agg(j.id ORDER BY n.at) INTO v_taken
      FROM unnest(p_ids) WITH ORDINALITY n (id, at) LEFT JOIN warp.job j ON j.id = n.id;
    FOR v_try IN 1 .. 1000 LOOP
        -- Waits for whoever takes or frees the same key just now.
        INSERT INTO warp.unique_key (key, job)
        SELECT DISTINCT ON (n.key COLLATE "C") n.key, n.handle
          FROM unnest(p_unique_keys, v_handles, v_taken) WITH ORDINALITY n (key, handle, taken, at)
         WHERE n.key IS NOT NULL AND n.taken IS NULL
         ORDER BY n.key COLLATE "C", n.at ON CONFLICT (key) DO NOTHING;
        SELECT array_agg(coalesce(n.taken, CASE WHEN u.job <> n.handle THEN coalesce(j.id, b.id) END) ORDER BY n.at),
               bool_or(n.key IS NOT NULL AND n.taken IS NULL
                       AND (u.job IS NULL OR u.job <> n.handle AND j.id IS NULL AND b.id IS NULL))
          INTO v_taken, v_is_open
          FROM unnest(p_unique_keys, v_handles, v_taken) WITH ORDINALITY n (key, handle, taken, at)
          LEFT JOIN warp.unique_key u ON u.key = n.key
          LEFT JOIN warp.job j ON j.handle = u.job
          LEFT JOIN unnest(v_handles, p_ids) b (handle, id) ON b.handle = u.job;
        -- Whoever had a key may have ended between the two statements.
        EXIT WHEN v_is_open IS NOT TRUE;
        IF v_try = 1000 THEN
            RAISE EXCEPTION 'a unique key belongs to no job';
        END IF;
    END LOOP;
    -- In the order of the ids, as every batch does it: two with the same ids do not wait for each other in a circle.
    WITH written AS (
        INSERT INTO warp.job (handle, id, created_at, lane, explicit, payload, metadata, trace_parent, unique_key)
        SELECT n.handle, n.id, p_now, n.lane, n.explicit, n.payload, n.metadata, n.trace_parent, n.unique_key
          FROM unnest(v_handles, p_ids, p_lanes, p_explicits, p_payloads, p_metadata, p_trace_parents, p_unique_keys, v_taken)
               n (handle, id, lane, explicit, payload, metadata, trace_parent, unique_key, taken)
         WHERE n.taken IS NULL
         ORDER BY n.id ON CONFLICT (id) DO NOTHING
        RETURNING handle)
    SELECT coalesce(array_agg(w.handle), '{}') INTO v_written FROM written w;
    IF cardinality(v_written) < cardinality(array_positions(v_taken, NULL)) THEN
        -- Somebody has written the same id since it was looked for: his job counts, and nothing of this one stays.
        SELECT array_agg(CASE WHEN n.taken IS NULL AND w.handle IS NULL THEN n.id ELSE n.taken END ORDER BY n.at) INTO v_taken
          FROM unnest(v_handles, p_ids, v_taken) WITH ORDINALITY n (handle, id, taken, at)
          LEFT JOIN unnest(v_written) w (handle) ON w.handle = n.handle;
        DELETE FROM warp.unique_key u
         USING unnest(v_handles, v_taken) n (handle, taken) WHERE u.job = n.handle AND n.taken IS NOT NULL;
    END IF;
    SELECT array_agg(n.handle), array_agg(n.lane), array_agg(n.explicit), array_agg(n.payload), array_agg(n.due), array_agg(n.unique_key)
      INTO v_written, v_lanes, v_explicits, v_payloads, v_dues, v_unique_keys
      FROM unnest(v_handles, p_lanes, p_explicits, p_payloads, p_dues, p_unique_keys, v_taken)
           n (handle, lane, explicit, payload, due, unique_key, taken)
     WHERE n.taken IS NULL;
    unsaid := warp.write_states(v_written, v_lanes, v_explicits, v_payloads, v_dues, v_unique_keys, p_now, false, p_quiet);
    taken := v_taken;
END $$;

-- Writes jobs in their order. `taken`: for each that was not written, the job with its id or its unique key, else NULL;
-- nothing at all when all were written. `unsaid`: lanes of `p_quiet` that the caller has to announce, once this has
-- committed. Bad jobs are the caller's affair; lanes and policies are numbers already.
CREATE OR REPLACE FUNCTION warp.enqueue_rows(
    p_ids uuid[], p_lanes int[], p_explicits int[], p_payloads text[], p_metadata text[], p_trace_parents text[],
    p_dues bigint[], p_unique_keys text[], p_now bigint, p_quiet int[] DEFAULT '{}',
    OUT taken uuid[], OUT unsaid int[]
) LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, warp.clock());
    v_handles bigint[];
    v_count int := cardinality(p_ids);
    v_from int := 1;
    v_to int;
    v_some record;
BEGIN
    IF num_nonnulls(VARIADIC p_unique_keys) = 0 THEN
        -- Nearly always no id is taken, and a plain insert costs less than one that expects a conflict.
        BEGIN
            v_handles := array(SELECT nextval('warp.handle') FROM generate_subscripts(p_ids, 1));
            INSERT INTO warp.job (handle, id, created_at, lane, explicit, payload, metadata, trace_parent)
            SELECT n.handle, n.id, v_now, n.lane, n.explicit, n.payload, n.metadata, n.trace_parent
              FROM unnest(v_handles, p_ids, p_lanes, p_explicits, p_payloads, p_metadata, p_trace_parents)
                   n (handle, id, lane, explicit, payload, metadata, trace_parent);
            unsaid := warp.write_states(v_handles, p_lanes, p_explicits, p_payloads, p_dues, p_unique_keys, v_now, false, p_quiet);
            RETURN;
        EXCEPTION WHEN unique_violation THEN
            -- Some id is there already, or twice among these.
            NULL;
        END;
    END IF;
    taken := '{}';
    unsaid := '{}';
    -- Where an id comes a second time, a new pass begins: it sees what has become of the first.
    WHILE v_from <= v_count LOOP
        SELECT coalesce(min(n.at) - 1, v_count) INTO v_to
          FROM (SELECT u.at + v_from - 1 AS at, row_number() OVER (PARTITION BY u.id ORDER BY u.at) AS nth
                  FROM unnest(p_ids[v_from:]) WITH ORDINALITY u (id, at)) n
         WHERE n.nth > 1;
        SELECT * INTO v_some FROM warp.enqueue_apart(
            p_ids[v_from:v_to], p_lanes[v_from:v_to], p_explicits[v_from:v_to], p_payloads[v_from:v_to],
            p_metadata[v_from:v_to], p_trace_parents[v_from:v_to], p_dues[v_from:v_to], p_unique_keys[v_from:v_to], v_now, p_quiet);
        taken := taken || v_some.taken;
        unsaid := unsaid || v_some.unsaid;
        v_from := v_to + 1;
    END LOOP;
END $$;

-- The same for one job that may run at once and has no unique key: whether it was written, else one with its id is there.
-- Announces `p_queue` unless that is NULL. With values instead of arrays and without a block to catch errors in, it takes
-- the server a third of the time. Waits only for whoever writes the same id at the same moment. Index: job_id.
CREATE OR REPLACE FUNCTION warp.enqueue_one(
    p_id uuid, p_lane int, p_explicit int, p_payload text, p_metadata text, p_trace_parent text, p_now bigint, p_queue text
) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    v_handle bigint := nextval('warp.handle');
BEGIN
    INSERT INTO warp.job (handle, id, created_at, lane, explicit, payload, metadata, trace_parent)
    VALUES (v_handle, p_id, v_now, p_lane, p_explicit, p_payload, p_metadata, p_trace_parent) ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO warp.ready (handle, due, changed_at, lane, run, attempt, deaths, place, is_unique, bytes, explicit)
    VALUES (v_handle, v_now, v_now, p_lane, 0, 0, 0, 1, false,
            CASE WHEN octet_length(p_payload) > 16384 THEN octet_length(p_payload) END, p_explicit);
    IF p_queue IS NOT NULL THEN
        PERFORM pg_notify('warp', p_queue);
    END IF;
    RETURN true;
END $$;

-- ------------------------------------------------------------------------------- for callers in any language

-- A text as it stands in a refusal, with what cannot be seen written out.
CREATE OR REPLACE FUNCTION warp.quoted(p_text text, p_quote text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_text text := replace(replace(p_text, '\', '\\'), p_quote, '\' || p_quote);
    v_control text;
BEGIN
    v_text := replace(replace(replace(v_text, E'\n', '\n'), E'\r', '\r'), E'\t', '\t');
    LOOP
        v_control := substring(v_text FROM '[\u0001-\u001f\u007f-\u009f]');
        EXIT WHEN v_control IS NULL;
        v_text := replace(v_text, v_control, '\u{' || to_hex(ascii(v_control)) || '}');
    END LOOP;
    RETURN p_quote || v_text || p_quote;
END $$;

-- What can never be stored is refused with the sentences that the hosts use.
CREATE OR REPLACE FUNCTION warp.refuse(p_why text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'WH002', MESSAGE = p_why;
END $$;

CREATE OR REPLACE FUNCTION warp.check_name(p_what text, p_name text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_control text := substring(p_name FROM '[\u0001-\u001f\u007f-\u009f]');
BEGIN
    IF coalesce(p_name, '') = '' THEN
        PERFORM warp.refuse(format('the %s is empty', p_what));
    ELSIF octet_length(p_name) > 200 THEN
        PERFORM warp.refuse(format('the %s has %s bytes; 200 are allowed', p_what, octet_length(p_name)));
    ELSIF v_control IS NOT NULL THEN
        PERFORM warp.refuse(format('the %s %s contains the control character %s',
                                   p_what, warp.quoted(p_name, '"'), warp.quoted(v_control, '''')));
    END IF;
END $$;

-- JSON that every host can parse and every database can store. The depth is told by the brackets outside strings, before
-- any parser meets it; the text is taken apart only where it has enough of them.
CREATE OR REPLACE FUNCTION warp.check_payload(p_payload text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_brackets text;
    v_inside text;
    v_depth int := 0;
    v_json jsonb;
BEGIN
    IF p_payload IS NULL THEN
        PERFORM warp.refuse('the payload is not JSON: it is NULL');
    ELSIF octet_length(p_payload) > 10485760 THEN
        PERFORM warp.refuse(format('the payload has %s bytes; 10485760 are allowed', octet_length(p_payload)));
    END IF;
    IF length(p_payload) - length(translate(p_payload, '[{', '')) > 127 THEN
        v_brackets := translate(regexp_replace(regexp_replace(p_payload, '"([^"\\]|\\.)*"', '', 'g'), '[^][{}]', '', 'g'), '{}', '[]');
        LOOP
            v_inside := replace(v_brackets, '[]', '');
            EXIT WHEN v_inside = v_brackets OR v_depth > 127;
            v_brackets := v_inside;
            v_depth := v_depth + 1;
        END LOOP;
        -- What is left over was never closed.
        IF v_depth + length(v_brackets) - length(replace(v_brackets, '[', '')) > 127 THEN
            PERFORM warp.refuse('the payload is nested deeper than 127 levels');
        END IF;
    END IF;
    IF p_payload LIKE '%\\u0000%' AND regexp_replace(p_payload, '\\\\', '', 'g') LIKE '%\\u0000%' THEN
        PERFORM warp.refuse('the payload contains a NUL character, which not every database can store');
    END IF;
    BEGIN
        v_json := p_payload::jsonb;
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        PERFORM warp.refuse('the payload is not JSON: ' || SQLERRM);
    END;
    -- A number that no host can hold.
    IF p_payload ~ '[eE]\+?[0-9]{3}|[0-9]{200}'
       AND jsonb_path_exists(v_json, '$.** ? (@.type() == "number" && (@ > 1.7976931348623157e308 || @ < -1.7976931348623157e308))')
    THEN
        PERFORM warp.refuse('the payload is not JSON: number out of range');
    END IF;
END $$;

-- Metadata as it is stored, a list of pairs; given as an object, or as such a list where order or repeated names matter.
CREATE OR REPLACE FUNCTION warp.metadata_text(p_metadata jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_pairs jsonb := p_metadata;
    v_pair jsonb;
BEGIN
    IF coalesce(jsonb_typeof(p_metadata), 'null') = 'null' THEN
        RETURN NULL;
    ELSIF jsonb_typeof(p_metadata) = 'object' THEN
        SELECT coalesce(jsonb_agg(jsonb_build_array(m.key, m.value) ORDER BY m.key COLLATE "C"), '[]')
          INTO v_pairs FROM jsonb_each(p_metadata) m;
    ELSIF jsonb_typeof(p_metadata) <> 'array' THEN
        PERFORM warp.refuse('the metadata is neither an object nor a list of pairs');
    END IF;
    FOR v_pair IN SELECT p.value FROM jsonb_array_elements(v_pairs) p LOOP
        IF jsonb_typeof(v_pair) <> 'array' OR jsonb_array_length(v_pair) <> 2 OR jsonb_typeof(v_pair -> 0) <> 'string' THEN
            PERFORM warp.refuse('the metadata is neither an object nor a list of pairs');
        END IF;
        PERFORM warp.check_name('metadata name', v_pair ->> 0);
        IF jsonb_typeof(v_pair -> 1) <> 'string' THEN
            PERFORM warp.refuse(format('the metadata value of %s is not a text', warp.quoted(v_pair ->> 0, '"')));
        END IF;
    END LOOP;
    RETURN nullif(v_pairs, '[]')::text;
END $$;

-- One number of a policy, or what it is without being said.
CREATE OR REPLACE FUNCTION warp.policy_number(p_rules jsonb, p_name text, p_default bigint, p_from bigint, p_to bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_text text := coalesce(p_rules ->> p_name, p_default::text);
BEGIN
    IF v_text IS NULL OR v_text !~ '^[0-9]{1,18}$' OR v_text::bigint NOT BETWEEN p_from AND p_to THEN
        PERFORM warp.refuse(format('the policy''s "%s" must be a whole number from %s to %s', p_name, p_from, p_to));
    END IF;
    RETURN v_text::bigint;
END $$;

-- One word of a policy, or what it is without being said.
CREATE OR REPLACE FUNCTION warp.policy_word(p_rules jsonb, p_name text, p_default text, VARIADIC p_words text[])
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_text text := coalesce(p_rules ->> p_name, p_default);
BEGIN
    IF v_text IS NULL OR v_text <> ALL (p_words) THEN
        PERFORM warp.refuse(format('the policy''s "%s" must be one of %s', p_name, array_to_string(p_words, ', ')));
    END IF;
    RETURN v_text;
END $$;

-- An explicit policy in the one text that hosts read (a stamp whose every source is the call). Given as
-- {"concurrency": {"kind": "mutex"|"semaphore", "keys": ["account:{id}"], "limit", "weight", "mode": "skip"|"wait",
-- "order": "any"|"fifo", "on_retry": "block"|"pass"}, "retry": {"max", "delays_ms": [], "jitter_permille"},
-- "timeout": {"per_attempt_ms", "mode": "fail"|"delete"}}; what is left out has the defaults of a manifest. A family may
-- also be given as it is stored, with its source behind it.
CREATE OR REPLACE FUNCTION warp.policy_text(p_policy jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_families text[] := '{}';
    v_family record;
    v_rules jsonb;
    v_unknown text;
    v_known text[];
    v_text text;
    v_kind text;
BEGIN
    IF coalesce(jsonb_typeof(p_policy), 'null') = 'null' THEN
        RETURN NULL;
    ELSIF jsonb_typeof(p_policy) <> 'object' THEN
        PERFORM warp.refuse('the policy is not an object');
    END IF;
    FOR v_family IN SELECT f.key AS name, f.value AS rules FROM jsonb_each(p_policy) f ORDER BY f.key COLLATE "C" LOOP
        v_rules := v_family.rules;
        IF jsonb_typeof(v_rules) = 'array' AND v_rules -> 1 = '{"from": "enqueue"}' AND jsonb_array_length(v_rules) = 2 THEN
            v_rules := v_rules -> 0;
        END IF;
        IF jsonb_typeof(v_rules) <> 'object' THEN
            PERFORM warp.refuse(format('the policy''s "%s" is not an object', v_family.name));
        END IF;
        CASE v_family.name
        WHEN 'concurrency' THEN
            v_known := '{kind,keys,limit,weight,mode,order,on_retry}';
            v_kind := warp.policy_word(v_rules, 'kind', NULL, 'mutex', 'semaphore');
            IF coalesce(jsonb_typeof(v_rules -> 'keys'), '') <> 'array' OR jsonb_array_length(v_rules -> 'keys') = 0
               OR EXISTS (SELECT FROM jsonb_array_elements(v_rules -> 'keys') k
                           WHERE jsonb_typeof(k.value) <> 'string' OR k.value #>> '{}' !~ '^([^{}]|\{\{|\}\}|\{[^{}]+\})+$') THEN
                PERFORM warp.refuse('the policy''s "keys" must be a list of key templates, such as "account:{id}"');
            END IF;
            v_text := format('{"kind":"%s","keys":%s,"limit":%s,"weight":%s,"mode":"%s","order":"%s","on_retry":"%s"}',
                v_kind, v_rules -> 'keys',
                warp.policy_number(v_rules, 'limit', CASE v_kind WHEN 'mutex' THEN 1 END, 1,
                                   CASE v_kind WHEN 'mutex' THEN 1 ELSE 2147483647 END),
                warp.policy_number(v_rules, 'weight', 1, 1, 2147483647),
                warp.policy_word(v_rules, 'mode', CASE v_kind WHEN 'mutex' THEN 'skip' ELSE 'wait' END, 'skip', 'wait'),
                warp.policy_word(v_rules, 'order', 'any', 'any', 'fifo'),
                warp.policy_word(v_rules, 'on_retry', 'block', 'block', 'pass'));
        WHEN 'retry' THEN
            v_known := '{max,delays_ms,jitter_permille}';
            IF coalesce(jsonb_typeof(v_rules -> 'delays_ms'), 'array') <> 'array'
               OR EXISTS (SELECT FROM jsonb_array_elements(coalesce(v_rules -> 'delays_ms', '[]')) d
                           WHERE d.value #>> '{}' !~ '^[0-9]{1,15}$' OR jsonb_typeof(d.value) <> 'number') THEN
                PERFORM warp.refuse('the policy''s "delays_ms" must be a list of whole numbers');
            END IF;
            v_text := format('{"max":%s,"delays_ms":%s,"jitter_permille":%s}',
                warp.policy_number(v_rules, 'max', NULL, 0, 4294967295), coalesce(v_rules -> 'delays_ms', '[]'),
                warp.policy_number(v_rules, 'jitter_permille', 0, 0, 1000));
        WHEN 'timeout' THEN
            v_known := '{per_attempt_ms,mode}';
            v_text := format('{"per_attempt_ms":%s,"mode":"%s"}',
                warp.policy_number(v_rules, 'per_attempt_ms', NULL, 1, 999999999999999),
                warp.policy_word(v_rules, 'mode', 'fail', 'fail', 'delete'));
        ELSE
            PERFORM warp.refuse(format('the policy has no family "%s"; one of concurrency, retry, timeout is expected', v_family.name));
        END CASE;
        SELECT k INTO v_unknown FROM jsonb_object_keys(v_rules) k WHERE k <> ALL (v_known) ORDER BY k LIMIT 1;
        IF FOUND THEN
            PERFORM warp.refuse(format('the policy''s "%s" has no "%s"', v_family.name, v_unknown));
        END IF;
        v_families := v_families || format('"%s":[%s,{"from":"enqueue"}]', v_family.name, v_text);
    END LOOP;
    RETURN CASE WHEN v_families <> '{}' THEN '{' || array_to_string(v_families, ',') || '}' END;
END $$;

-- A UUIDv7 of this instant. Bytes 0 to 5 are the time, byte 6 begins with the version.
CREATE OR REPLACE FUNCTION warp.new_id(p_now bigint) RETURNS uuid LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_bytes bytea := uuid_send(gen_random_uuid());
BEGIN
    v_bytes := substring(int8send(p_now) FROM 3) || substring(v_bytes FROM 7);
    RETURN encode(set_byte(v_bytes, 6, get_byte(v_bytes, 6) & 15 | 112), 'hex')::uuid;
END $$;

-- Enqueues a job in the caller's own transaction: it exists for others, and idle hosts hear of it, when that commits, and
-- never if it is rolled back. Answers its id or, where another job that has not ended has its unique key, that one's.
-- Until the caller commits, others who enqueue wait for him where they want his unique key, or where he was the first ever to
-- mention a contract in a queue.
CREATE OR REPLACE FUNCTION warp.enqueue(
    contract text, payload text, queue text DEFAULT 'default', due timestamptz DEFAULT NULL, metadata jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL, trace_parent text DEFAULT NULL, policy jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := warp.clock();
    v_due bigint;
    v_id uuid := warp.new_id(v_now);
    v_handle bigint := nextval('warp.handle');
    v_lane int;
    v_metadata text := warp.metadata_text(enqueue.metadata);
    v_policy text := warp.policy_text(enqueue.policy);
    v_explicit int;
    v_other uuid;
BEGIN
    PERFORM warp.check_name('contract', enqueue.contract);
    PERFORM warp.check_name('queue', enqueue.queue);
    IF enqueue.unique_key IS NOT NULL THEN
        PERFORM warp.check_name('unique key', enqueue.unique_key);
    END IF;
    PERFORM warp.check_payload(enqueue.payload);
    IF isfinite(enqueue.due) THEN
        v_due := (extract(epoch FROM enqueue.due) * 1000)::bigint;
    ELSIF enqueue.due IS NOT NULL THEN
        PERFORM warp.refuse('the due time is infinite');
    END IF;
    v_lane := (warp.lane_ids(array[enqueue.contract], array[enqueue.queue]))[1];
    IF v_policy IS NOT NULL THEN
        v_explicit := (warp.policy_ids(array[v_policy]))[1];
    END IF;
    FOR v_try IN 1 .. CASE WHEN enqueue.unique_key IS NOT NULL THEN 1000 ELSE 0 END LOOP
        INSERT INTO warp.unique_key (key, job) VALUES (enqueue.unique_key, v_handle) ON CONFLICT (key) DO NOTHING;
        EXIT WHEN FOUND;
        SELECT j.id INTO v_other FROM warp.unique_key u JOIN warp.job j ON j.handle = u.job WHERE u.key = enqueue.unique_key;
        IF FOUND THEN
            RETURN v_other;
        ELSIF v_try = 1000 THEN
            RAISE EXCEPTION 'the unique key % belongs to no job', enqueue.unique_key;
        END IF;
    END LOOP;
    INSERT INTO warp.job (handle, id, created_at, lane, explicit, payload, metadata, trace_parent, unique_key)
    VALUES (v_handle, v_id, v_now, v_lane, v_explicit, enqueue.payload, v_metadata, enqueue.trace_parent, enqueue.unique_key);
    PERFORM warp.write_states(array[v_handle], array[v_lane], array[v_explicit], array[enqueue.payload], array[v_due],
                              array[enqueue.unique_key], v_now, true, '{}');
    RETURN v_id;
END $$;

CREATE OR REPLACE FUNCTION warp.enqueue(
    contract text, payload jsonb, queue text DEFAULT 'default', due timestamptz DEFAULT NULL, metadata jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL, trace_parent text DEFAULT NULL, policy jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE sql AS $$
    SELECT warp.enqueue(contract, payload::text, queue, due, metadata, unique_key, trace_parent, policy)
$$;

CREATE OR REPLACE FUNCTION warp.enqueue(
    contract text, payload json, queue text DEFAULT 'default', due timestamptz DEFAULT NULL, metadata jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL, trace_parent text DEFAULT NULL, policy jsonb DEFAULT NULL
) RETURNS uuid LANGUAGE sql AS $$
    SELECT warp.enqueue(contract, payload::text, queue, due, metadata, unique_key, trace_parent, policy)
$$;
