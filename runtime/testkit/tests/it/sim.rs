//! Ten thousand seeds keep every promise.

use warp_testkit::sim::{Plan, Seen, report, run};

/// Enough to fill a line, lose a host and get it back; short enough for ten thousand seeds.
pub(crate) const STEPS: usize = 90;

pub(crate) fn plan(seed: u64) -> Plan {
    Plan { seed, steps: STEPS, ..Plan::default() }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number of seeds, or a seed"))
}

/// One of four shares, so that the test runner's threads take them side by side.
fn share(which: u64) {
    let seeds = number("WARP_SIM_SEEDS").unwrap_or(10_000);
    let mut sum = Seen::default();
    for seed in (which..seeds).step_by(4) {
        match run(&plan(seed)) {
            Ok(seen) => {
                sum.starts += seen.starts;
                sum.parks += seen.parks;
                sum.skips += seen.skips;
                sum.hand_ons += seen.hand_ons;
                sum.rescued += seen.rescued;
                sum.late += seen.late;
                sum.repeated += seen.repeated;
                sum.poisoned += seen.poisoned;
                sum.expired += seen.expired;
                sum.waits += seen.waits;
                sum.passes += seen.passes;
            }
            Err(failure) => panic!("{}", report(&plan(seed), failure)),
        }
    }
    println!("{sum:?}");
    // A simulation in which nothing happens proves nothing.
    let Seen { starts, parks, skips, hand_ons, rescued, late, repeated, poisoned, expired, waits, passes } = sum;
    for (what, count) in [
        ("starts", starts),
        ("parks", parks),
        ("skips", skips),
        ("hand-ons", hand_ons),
        ("rescued rows", rescued),
        ("late settles", late),
        ("repeated settles", repeated),
        ("poisoned settles", poisoned),
        ("expired reservations", expired),
        ("local waiters", waits),
        ("passes", passes),
    ] {
        assert!(count * 200 >= seeds / 4, "only {count} {what} in {} runs", seeds / 4);
    }
}

#[test]
fn every_seed_keeps_every_promise_1() {
    share(0);
}

#[test]
fn every_seed_keeps_every_promise_2() {
    share(1);
}

#[test]
fn every_seed_keeps_every_promise_3() {
    share(2);
}

#[test]
fn every_seed_keeps_every_promise_4() {
    share(3);
}

#[test]
fn a_seed_does_the_same_again() {
    let text = |seed| format!("{:?}", run(&plan(seed)).map_err(|failure| failure.broken));
    for seed in 0..20 {
        assert_eq!(text(seed), text(seed));
    }
}

/// For people: `WARP_SIM_SEED=… cargo test -p warp-testkit replay -- --nocapture`.
#[test]
fn replay() {
    let Some(seed) = number("WARP_SIM_SEED") else { return };
    let mutation = std::env::var("WARP_SIM_MUTATION").ok().map(|name| {
        let named = crate::mutations::TABLE.iter().map(|(_, _, mutation)| *mutation).find(|mutation| format!("{mutation:?}") == name);
        named.unwrap_or_else(|| panic!("no mutation is called {name}"))
    });
    let plan = Plan { whole_trace: true, mutation, ..plan(seed) };
    match run(&plan) {
        Ok(seen) => println!("seed {seed} keeps every promise: {seen:?}"),
        Err(failure) => {
            failure.trace.iter().for_each(|line| println!("{line}"));
            panic!("{}", report(&plan, failure));
        }
    }
}
