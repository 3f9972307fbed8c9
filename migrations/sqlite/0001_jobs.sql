-- The first schema: jobs, their narrow state rows, the slot ledger, hosts, output, shared state.
--
-- A job is written once (`job`) and its state lives in one narrow row beside it (`job_state`). Every index that
-- a claim, an activation, a hand-on or a rescue reads is partial, so a row that has ended is in none of them
-- and never slows one down. No foreign keys: the one writer keeps the rows together, and a check per row
-- would cost the hot path more than it could ever catch.

-- One row: the numbers that are handed out next. Drawn inside the transaction that uses them.
CREATE TABLE sequence (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    handle INTEGER NOT NULL,
    token INTEGER NOT NULL,
    ticket INTEGER NOT NULL,
    entry INTEGER NOT NULL,
    -- Raised by every transaction after which somebody should look for work; other processes watch it.
    wakes INTEGER NOT NULL
) STRICT;
INSERT INTO sequence VALUES (1, 1, 1, 1, 1, 0);

-- Interned: a contract in a queue, a policy by its canonical text, a plugin version.
CREATE TABLE lane (
    id INTEGER PRIMARY KEY,
    contract TEXT NOT NULL,
    queue TEXT NOT NULL,
    UNIQUE (contract, queue)
) STRICT;
CREATE TABLE policy (id INTEGER PRIMARY KEY, body TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE digest (id INTEGER PRIMARY KEY, sha256 BLOB NOT NULL UNIQUE) STRICT;

CREATE TABLE job (
    handle INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    lane INTEGER NOT NULL,
    payload TEXT NOT NULL,
    metadata TEXT,
    trace_parent TEXT,
    explicit INTEGER,
    unique_key TEXT,
    created_at INTEGER NOT NULL
) STRICT;

-- place: 0 scheduled, 1 ready, 2 parked, 3 reserved, 4 running, 5 awaiting, 10 completed, 11 failed, 12 deleted.
CREATE TABLE job_state (
    handle INTEGER PRIMARY KEY,
    lane INTEGER NOT NULL,
    place INTEGER NOT NULL,
    due INTEGER NOT NULL,
    run INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    is_unique INTEGER NOT NULL DEFAULT 0,
    stamp INTEGER,
    digest INTEGER,
    keys TEXT,
    ticket INTEGER,
    parked_on INTEGER,
    refusal TEXT,
    token INTEGER,
    settled INTEGER,
    host INTEGER,
    changed_at INTEGER NOT NULL
) STRICT;
CREATE INDEX state_ready ON job_state (lane, due, handle) WHERE place = 1;
CREATE INDEX state_reserved ON job_state (lane, due, handle) WHERE place = 3;
CREATE INDEX state_scheduled ON job_state (due) WHERE place = 0;
CREATE INDEX state_parked ON job_state (parked_on, ticket) WHERE place = 2;
CREATE INDEX state_running ON job_state (host) WHERE place = 4;
CREATE INDEX state_woken ON job_state (changed_at) WHERE place = 1 AND parked_on IS NOT NULL;
CREATE INDEX state_ended ON job_state (place, changed_at) WHERE place >= 10;

-- Texts that a claim never reads.
CREATE TABLE outcome (
    job INTEGER PRIMARY KEY,
    result TEXT,
    error TEXT,
    dropped_lines INTEGER NOT NULL DEFAULT 0,
    dropped_bytes INTEGER NOT NULL DEFAULT 0
) STRICT;

-- Unique keys of jobs that have not ended.
CREATE TABLE unique_key (key TEXT PRIMARY KEY, job INTEGER NOT NULL UNIQUE) STRICT, WITHOUT ROWID;

-- The ledger (slots.md B). A key's number is also its place in the one global order of keys (C4).
CREATE TABLE conc_key (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    admin_limit INTEGER,
    set_by TEXT,
    set_at INTEGER
) STRICT;
CREATE INDEX conc_key_limited ON conc_key (id) WHERE admin_limit IS NOT NULL;
-- A slot is reserved while its job's place is 3, and held while it is 4.
CREATE TABLE slot (
    key INTEGER NOT NULL,
    number INTEGER NOT NULL,
    job INTEGER NOT NULL,
    stamped INTEGER NOT NULL,
    since INTEGER NOT NULL,
    PRIMARY KEY (key, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX slot_job ON slot (job);
CREATE TABLE blocker (
    key INTEGER NOT NULL,
    job INTEGER NOT NULL,
    ticket INTEGER NOT NULL,
    PRIMARY KEY (key, job)
) STRICT, WITHOUT ROWID;
CREATE INDEX blocker_job ON blocker (job);

-- Hosts. A row of `host` is a live registration; its number is never given again (it is the epoch). Names
-- outlive registrations, because audit rows show them.
CREATE TABLE host (
    id INTEGER PRIMARY KEY,
    version TEXT NOT NULL,
    renewals INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    renewed_at INTEGER NOT NULL
) STRICT;
CREATE TABLE host_name (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL) STRICT;
CREATE TABLE host_contract (
    host INTEGER NOT NULL,
    contract TEXT NOT NULL,
    PRIMARY KEY (host, contract)
) STRICT, WITHOUT ROWID;
CREATE INDEX host_contract_contract ON host_contract (contract);
CREATE TABLE cancel_request (
    job INTEGER PRIMARY KEY,
    token INTEGER NOT NULL,
    asked_by TEXT NOT NULL
) STRICT;

-- History. `entry` comes from one sequence, so the rows of a job are clustered and in order.
CREATE TABLE audit (
    job INTEGER NOT NULL,
    entry INTEGER NOT NULL,
    at INTEGER NOT NULL,
    event INTEGER NOT NULL,
    run INTEGER NOT NULL,
    message TEXT,
    host INTEGER,
    digest INTEGER,
    took_us INTEGER,
    PRIMARY KEY (job, entry)
) STRICT, WITHOUT ROWID;
CREATE TABLE log (
    job INTEGER NOT NULL,
    entry INTEGER NOT NULL,
    at INTEGER NOT NULL,
    run INTEGER NOT NULL,
    stream TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (job, entry)
) STRICT, WITHOUT ROWID;
CREATE TABLE progress (
    job INTEGER NOT NULL,
    name TEXT NOT NULL,
    percent REAL NOT NULL,
    entry INTEGER NOT NULL,
    PRIMARY KEY (job, name)
) STRICT, WITHOUT ROWID;
-- `stats:…` only grows; `kept:…` is the number of ended rows still there.
CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;

-- State that handlers share.
CREATE TABLE state (
    bucket TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (bucket, key)
) STRICT, WITHOUT ROWID;
