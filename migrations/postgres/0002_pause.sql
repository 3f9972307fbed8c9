-- Queues and hosts that an operator has paused: they start nothing new until somebody resumes them.

CREATE TABLE warp.queue_pause (
    queue text PRIMARY KEY,
    paused_by text NOT NULL,
    paused_at bigint NOT NULL
);

-- Both or neither. A pause ends with the registration.
ALTER TABLE warp.host ADD COLUMN paused_by text, ADD COLUMN paused_at bigint;

-- Lanes from which some host may claim. A waiter of any other lane holds nobody up and is given nothing (B7).
CREATE VIEW warp.claimable_lane AS
SELECT l.id AS lane FROM warp.lane l
 WHERE EXISTS (
           SELECT FROM warp.host_contract c JOIN warp.host h ON h.id = c.host
            WHERE c.contract = l.contract AND h.paused_at IS NULL)
   AND NOT EXISTS (SELECT FROM warp.queue_pause q WHERE q.queue = l.queue);
