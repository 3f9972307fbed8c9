//! The one list of what wraps a handler, outermost first, with the reasons for the order.

/// Where a behaviour acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In the claim's transaction, before a worker sees the job: it costs no worker and no attempt.
    Claim,
    /// Around the handler, on the host.
    Run,
    /// On the run's outcome, before it is settled.
    Settle,
}

/// One thing that wraps a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behaviour {
    /// The family's word.
    pub name: &'static str,
    /// Where it acts.
    pub acts: Where,
    /// Why it stands where it stands.
    pub because: &'static str,
}

/// Outermost first. A behaviour that ends a run sets an outcome, and a later one never overwrites an earlier one.
///
/// Deadline, circuit breaker and rate limit take their places when they work; until then a manifest that
/// declares them is refused.
pub const BEHAVIOURS: [Behaviour; 4] = [
    Behaviour {
        name: "retry",
        acts: Where::Settle,
        because: "outside concurrency: a job that waits out its delay holds no slot, so the slot is free before the delay begins",
    },
    Behaviour {
        name: "concurrency",
        acts: Where::Claim,
        because: "outside the timeout: waiting for a key must not use up the time of the attempt; inside retry: a refused slot charges nothing",
    },
    Behaviour {
        name: "per-attempt timeout",
        acts: Where::Run,
        because: "directly around the handler: it bounds instantiation and call, and retry sees what it does",
    },
    Behaviour { name: "handler", acts: Where::Run, because: "the work itself" },
];

#[cfg(test)]
mod tests {
    use super::BEHAVIOURS;

    /// The order is a promise of the product; whoever changes it changes this line and the document.
    #[test]
    fn the_order_is_the_promised_one() {
        let names: Vec<_> = BEHAVIOURS.iter().map(|behaviour| behaviour.name).collect();
        assert_eq!(names, ["retry", "concurrency", "per-attempt timeout", "handler"]);
    }
}
