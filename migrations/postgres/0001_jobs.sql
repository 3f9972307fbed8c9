-- The first schema: jobs, their state rows, the slot ledger, hosts, output, shared state.
--
-- A job is written once (`job`). Its one state row lives in one of four tables and moves between them: `ready` (may
-- run now, or has a slot reserved), `waiting` (due later, parked on a key, or awaiting another job), `running`,
-- `ended`. So what a claim scans holds runnable rows only, the hot tables stay small whatever the history grows to, and
-- what has ended is never updated. All four have the columns of the type `state_row`, in its order.
--
-- Times are milliseconds since 1970 (UTC). No foreign keys: rows move only through the functions of this schema, and
-- a check per row would cost the hot path more than it could ever catch. The schema is called `warp` here; another
-- name is put in its place when it is installed. It exists by then: whoever may not create schemas is given one.

-- One row: what is true of the database as a whole. `locks` is the kind of its slots, 'ledger' or 'session'.
CREATE TABLE warp.setting (
    one bool PRIMARY KEY DEFAULT true CHECK (one),
    locks text NOT NULL DEFAULT 'ledger' CHECK (locks IN ('ledger', 'session')),
    locks_set_by text NOT NULL DEFAULT 'migrate',
    locks_set_at bigint
);
INSERT INTO warp.setting DEFAULT VALUES;

-- Drawn inside the transaction that uses them. Of the token CACHE 1 is part of its meaning: it is the fencing token
-- too, drawn after the grant, so that of two holders of a key the later has the larger.
CREATE SEQUENCE warp.handle CACHE 1;
CREATE SEQUENCE warp.token CACHE 1;
CREATE SEQUENCE warp.ticket CACHE 1;
CREATE SEQUENCE warp.entry CACHE 1;

-- Interned: a contract in a queue, a policy by its canonical text, a plugin version.
CREATE TABLE warp.lane (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    contract text NOT NULL,
    queue text NOT NULL,
    UNIQUE (contract, queue)
);
-- The rules of the concurrency family stand beside the text, so that the ledger need not read it. NULL: no key.
CREATE TABLE warp.policy (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- SHA-256 of the text, which may itself be longer than an index entry.
    hash bytea NOT NULL UNIQUE,
    body text NOT NULL,
    slots int,
    weight int,
    skips bool,
    is_fifo bool,
    blocks bool
);
CREATE TABLE warp.digest (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sha256 bytea NOT NULL UNIQUE
);

CREATE TABLE warp.job (
    handle bigint PRIMARY KEY,
    id uuid NOT NULL,
    created_at bigint NOT NULL,
    lane int NOT NULL,
    explicit int,
    payload text NOT NULL,
    metadata text,
    trace_parent text,
    unique_key text
);
CREATE UNIQUE INDEX job_id ON warp.job (id);

-- place: 0 scheduled, 1 ready, 2 parked, 3 reserved, 4 running, 5 awaiting, 10 completed, 11 failed, 12 deleted.
CREATE TYPE warp.state_row AS (
    handle bigint,
    due bigint,
    changed_at bigint,
    lane int,
    -- Starts so far, and those that are charged; one that goes on counts in both.
    run int,
    attempt int,
    -- Uncharged ends by the death of a host.
    deaths smallint,
    place smallint,
    is_unique bool,
    -- The payload's size in bytes where it is large (above 16 KiB): a claim brings only so many of them at once.
    bytes int,
    -- What the caller declared, until it is resolved into `stamp` by the first claim.
    explicit int,
    stamp int,
    digest int,
    -- The host that runs it or, once it has ended, ran it last; and since when.
    host int,
    claimed_at bigint,
    took_us bigint,
    token bigint,
    -- The token of the last run that was settled, so that a repeat is recognised as done (C1).
    settled bigint,
    -- Its keys in their global order, each once (C4); NULL is a job without a key, or one that has no stamp yet.
    keys bigint[],
    ticket bigint,
    -- The key it is parked on, or was woken or reserved for.
    parked_on bigint,
    -- What refused it, in words, from its first parking to its next start.
    refusal text
);

CREATE TABLE warp.ready OF warp.state_row (PRIMARY KEY (handle))
    WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ready_due ON warp.ready (lane, due, handle) WHERE place = 1;
CREATE INDEX ready_reserved ON warp.ready (lane, due, handle) WHERE place = 3;
-- What a claim must look at one by one: it declared something, has keys, or is large.
CREATE INDEX ready_special ON warp.ready (lane) WHERE place = 1 AND (explicit IS NOT NULL OR keys IS NOT NULL OR bytes IS NOT NULL);
CREATE INDEX ready_woken ON warp.ready (parked_on, changed_at) WHERE parked_on IS NOT NULL;

CREATE TABLE warp.waiting OF warp.state_row (PRIMARY KEY (handle))
    WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX waiting_due ON warp.waiting (due) WHERE place = 0;
CREATE INDEX waiting_parked ON warp.waiting (parked_on, ticket) WHERE place = 2;
-- For questions about a contract or a queue. What never waits pays nothing for it.
CREATE INDEX waiting_lane ON warp.waiting (lane, place);

CREATE TABLE warp.running OF warp.state_row (PRIMARY KEY (host, handle))
    WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE warp.ended OF warp.state_row (PRIMARY KEY (handle));
-- By lane, so that a list of a contract's few jobs is found among any number of others.
CREATE INDEX ended_at ON warp.ended (place, lane, changed_at);

-- Texts that a claim never reads.
CREATE TABLE warp.outcome (
    job bigint PRIMARY KEY,
    result text,
    error text,
    dropped_lines bigint NOT NULL DEFAULT 0,
    dropped_bytes bigint NOT NULL DEFAULT 0
);

-- Unique keys of jobs that have not ended.
CREATE TABLE warp.unique_key (key text PRIMARY KEY, job bigint NOT NULL);
CREATE INDEX unique_key_job ON warp.unique_key (job);

-- The ledger (slots.md B). A key's row is its lock, and its number its place in the one global order of keys (C4).
-- `high` and `version` serve session locks only (slots.md A2, A10).
CREATE TABLE warp.conc_key (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text NOT NULL UNIQUE,
    admin_limit int,
    set_by text,
    set_at bigint,
    high int NOT NULL DEFAULT 1,
    version bigint NOT NULL DEFAULT 0
);
CREATE INDEX conc_key_limited ON warp.conc_key (id) WHERE admin_limit IS NOT NULL;
-- A slot without a token is reserved for a job that no host has claimed yet (B4). Its primary key is the second fence
-- against a holder too many (B1).
CREATE TABLE warp.slot (
    key bigint NOT NULL,
    number int NOT NULL,
    job bigint NOT NULL,
    stamped int NOT NULL,
    since bigint NOT NULL,
    token bigint,
    host int,
    PRIMARY KEY (key, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX slot_job ON warp.slot (job);
-- First-in-first-out jobs that keep a key through a retry delay.
CREATE TABLE warp.blocker (
    key bigint NOT NULL,
    job bigint NOT NULL,
    ticket bigint NOT NULL,
    PRIMARY KEY (key, job)
);
CREATE INDEX blocker_job ON warp.blocker (job);

-- Hosts. A row of `host` is a live registration; its number is never given again (it is the epoch). Names outlive
-- registrations, because the history shows them.
CREATE TABLE warp.host (
    id int PRIMARY KEY,
    version text NOT NULL,
    renewals bigint NOT NULL,
    started_at bigint NOT NULL,
    renewed_at bigint NOT NULL,
    -- The number of the last publication of what it can run.
    served bigint NOT NULL DEFAULT 0,
    -- The backend of its lock connection, under session locks (A12).
    lock_backend int
) WITH (fillfactor = 50);
CREATE TABLE warp.host_name (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL);
CREATE TABLE warp.host_contract (host int NOT NULL, contract text NOT NULL, PRIMARY KEY (contract, host));
CREATE TABLE warp.cancel_request (job bigint PRIMARY KEY, token bigint NOT NULL, asked_by text NOT NULL);

-- History that the state row does not tell by itself. A run that goes on, and the last run of a job that Completed, stand
-- in `running` and `ended` (who, when, how long) and get their rows here only when the job goes on to another run.
-- `runs` is how many runs had started when it was written; event: 1 Created, 2 Processing, 3 Completed, 4 Failed,
-- 5 Scheduled, 6 Enqueued, 7 Requeued, 8 Deleted, 9 CancellationRequested.
CREATE TABLE warp.audit (
    job bigint NOT NULL,
    entry bigint NOT NULL DEFAULT nextval('warp.entry'),
    at bigint NOT NULL,
    event smallint NOT NULL,
    run int NOT NULL,
    runs int NOT NULL,
    message text,
    host int,
    digest int,
    took_us bigint,
    PRIMARY KEY (job, entry)
);
CREATE TABLE warp.log (
    job bigint NOT NULL,
    entry bigint NOT NULL DEFAULT nextval('warp.entry'),
    at bigint NOT NULL,
    run int NOT NULL,
    stream text NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (job, entry)
);
CREATE TABLE warp.progress (
    job bigint NOT NULL,
    name text NOT NULL,
    percent real NOT NULL,
    entry bigint NOT NULL DEFAULT nextval('warp.entry'),
    PRIMARY KEY (job, name)
);
-- Only grows; folded by a task. `stats:…` counts for ever, `kept:…` is the number of ended rows still there.
CREATE TABLE warp.counter (name text NOT NULL, value bigint NOT NULL);

-- State that handlers share. Writers of one value take turns by a transaction-scoped lock on its name.
CREATE TABLE warp.state (
    bucket text NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (bucket, key)
);
