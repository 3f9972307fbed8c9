//! Each rule, broken: the simulation notices.

use std::fmt::Write as _;

use warp_domain::ledger::Rule;
use warp_testkit::model::Mutation;
use warp_testkit::sim::{Plan, run};

use crate::sim::{STEPS, plan};

/// A broken rule must show within so many seeds; the normal test command runs ten thousand.
const MOST_SEEDS: u64 = 3_000;

/// Rule, what is broken about it, the mutation.
pub(crate) const TABLE: &[(&str, &str, Mutation)] = &[
    ("C1", "a settle matches the job alone, not its token", Mutation::SettleIgnoresToken),
    ("C1 (W3)", "a late settle frees the slots by job id", Mutation::LateSettleFrees),
    ("C1", "a claim does not check that its host is registered", Mutation::ClaimIgnoresLease),
    ("C1", "a repeated settle is applied again", Mutation::RepeatAppliesAgain),
    ("C2, B1 (W2)", "a claim decides on the view of an earlier transaction", Mutation::StaleView),
    ("C3", "a lapsed host drops its runs and renews", Mutation::DropsAndRenews),
    ("C3", "a host that was rescued goes on under a new number", Mutation::GoesOnAfterLoss),
    ("C4", "keys are taken one by one and kept when one refuses", Mutation::Ledger(Rule::AllKeysOrNone)),
    ("C5 (W5)", "a delete does not hand on", Mutation::DeleteWithoutHandOn),
    ("C5, B7", "a pause, or its end, does not hand on", Mutation::PauseWithoutHandOn),
    ("pauses", "a claim takes what is paused", Mutation::ClaimIgnoresPause),
    ("C5", "a job deleted in its retry delay leaves its block behind", Mutation::DeleteKeepsBlock),
    ("B2 (W4)", "a refused job does not hand its keys on", Mutation::Ledger(Rule::RefusedHandsOn)),
    ("B2", "a reservation starts above a limit lowered since", Mutation::Ledger(Rule::ReservationRechecked)),
    ("B3", "a settle does not hand on", Mutation::SettleWithoutHandOn),
    ("B3", "a settle leaves the slots to a later transaction", Mutation::SettleKeepsSlots),
    ("B3–B5", "nobody who leaves hands on", Mutation::Ledger(Rule::ReleaseHandsOn)),
    ("B4 (W6)", "a freed slot is always given to the next", Mutation::Ledger(Rule::HandOnObeysTheLimit)),
    ("B4", "woken jobs with several keys are not counted", Mutation::Ledger(Rule::WideJobsCount)),
    ("B4 (W1)", "a job with several keys is given one slot", Mutation::Ledger(Rule::WideJobsAreWoken)),
    ("B5", "a rescue does not hand on", Mutation::RescueWithoutHandOn),
    ("B5 (W8)", "a rescue frees slots first, rows later", Mutation::RescueSlotsFirst),
    ("B5", "a rescue returns rows first, slots later", Mutation::RescueRowsFirst),
    ("B6 (W7)", "a raised limit is not handed on", Mutation::Ledger(Rule::RaiseHandsOn)),
    ("B6", "an admin limit does not outrank the stamp", Mutation::Ledger(Rule::AdminLimitOutranks)),
    ("B7", "unclaimed reservations are never taken back", Mutation::NoExpiry),
    ("B7", "who cannot be claimed holds the line up and is given slots", Mutation::Ledger(Rule::UnclaimableArePassedOver)),
    ("B7", "waiters that a deploy makes claimable are not handed on", Mutation::ServeWithoutHandOn),
    ("B7", "a fifo job whose reservation expires loses its place", Mutation::Ledger(Rule::FifoKeepsItsTicket)),
    ("weights", "a job heavier than the limit holds the line up", Mutation::Ledger(Rule::TooHeavyArePassedOver)),
    ("weights", "every job counts as one", Mutation::Ledger(Rule::WeightsCount)),
    ("stamps", "a start is counted against a holder's larger limit", Mutation::Ledger(Rule::OwnLimitCounts)),
    ("stamps", "somebody starts beside a holder at limit 1", Mutation::Ledger(Rule::ExclusiveHolder)),
    ("stamps", "the policy is resolved again at every claim", Mutation::StampAgain),
    ("B8", "a waiter begins, and its slot stays with who has ended", Mutation::BeginsWithoutPass),
    ("B8", "what has passed on is written behind the ends", Mutation::PassAfterEnds),
    ("B8", "an end frees the slot that has passed on", Mutation::EndFreesPassedSlot),
    ("B8", "a host without a slot is given local waiters", Mutation::WaitersWithoutSlot),
    ("B8", "a waiter that does not begin is kept", Mutation::KeepsWaiters),
    ("B8", "a waiter begins in place of a younger run", Mutation::BeginsBehind),
    ("B8", "a waiter is taken from behind one who may not be", Mutation::Ledger(Rule::WaitersAreTakenInOrder)),
    ("B8", "a newcomer waits inside a host although others wait", Mutation::Ledger(Rule::WaitsInsideOnlyWhenFull)),
    ("B8", "nobody looks who stands behind the waiters taken", Mutation::Ledger(Rule::TakenWaitersHandOn)),
    ("B8", "a job waits inside a host beside holders of another limit", Mutation::Ledger(Rule::PassBetweenLikes)),
    ("B8", "a job waits inside a host under an operator's limit", Mutation::Ledger(Rule::PassWithoutAdminLimit)),
    ("order", "a newcomer overtakes the line", Mutation::Ledger(Rule::NewcomersQueue)),
    ("order", "a hand-on passes over a head that could not start", Mutation::Ledger(Rule::HeadOfLine)),
    ("order", "a refused job loses its place in line", Mutation::Ledger(Rule::TicketIsKept)),
    ("order", "a newcomer slips in front of waiters not loaded", Mutation::Ledger(Rule::UnloadedMayCount)),
    ("order", "a line loaded in part is not loaded further", Mutation::NoReload),
    ("fifo", "a start without waiting forgets its ticket", Mutation::StartForgetsTicket),
    ("fifo, block", "a block keeps nobody back", Mutation::Ledger(Rule::BlockKeepsTheKey)),
    ("fifo, block", "a retry does not block", Mutation::RetryDoesNotBlock),
    ("fifo, block", "a block outlasts the start", Mutation::Ledger(Rule::StartEndsTheBlock)),
    ("Skip", "a job that has been started or parked is skipped", Mutation::Ledger(Rule::SkipBeforeFirstStart)),
    ("Skip", "a job is skipped for an operator's lower limit", Mutation::Ledger(Rule::SkipByStampOnly)),
    ("fencing", "the token is drawn before the grant", Mutation::TokenBeforeGrant),
    ("batches", "a poison row takes its batch with it", Mutation::PoisonTakesTheBatch),
];

#[test]
fn every_broken_rule_is_noticed() {
    let mut text = format!("{:<12} {:<60} seeds  noticed as\n", "rule", "mutation");
    let mut missed = Vec::new();
    for (rule, what, mutation) in TABLE {
        let noticed = (0..MOST_SEEDS).find_map(|seed| {
            let plan = Plan { mutation: Some(*mutation), steps: STEPS, ..plan(seed) };
            run(&plan).err().map(|failure| (seed + 1, failure.broken))
        });
        match noticed {
            Some((seeds, broken)) => {
                let broken: String = broken.chars().take(110).collect();
                let _ = writeln!(text, "{rule:<12} {what:<60} {seeds:>5}  {mutation:?}: {broken}");
            }
            None => missed.push(format!("{rule}: {what}")),
        }
    }
    println!("{text}");
    assert!(missed.is_empty(), "{text}\nnot noticed within {MOST_SEEDS} seeds: {missed:#?}");
}
