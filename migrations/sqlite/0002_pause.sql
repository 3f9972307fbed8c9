-- Queues and hosts that an operator has paused: they start nothing new until somebody resumes them.

CREATE TABLE queue_pause (
    queue TEXT PRIMARY KEY,
    paused_by TEXT NOT NULL,
    paused_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Both or neither. A pause ends with the registration.
ALTER TABLE host ADD COLUMN paused_by TEXT;
ALTER TABLE host ADD COLUMN paused_at INTEGER;

-- Lanes from which some host may claim. A waiter of any other lane holds nobody up and is given nothing (B7).
CREATE VIEW claimable_lane AS
SELECT l.id AS lane FROM lane l
WHERE EXISTS (
    SELECT 1 FROM host_contract c JOIN host h ON h.id = c.host
    WHERE c.contract = l.contract AND h.paused_at IS NULL
) AND NOT EXISTS (SELECT 1 FROM queue_pause q WHERE q.queue = l.queue);
