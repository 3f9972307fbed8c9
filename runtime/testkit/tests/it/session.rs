//! Session locks (kind A): every interleaving keeps every promise, and each rule, broken, shows.

use warp_domain::policy::Mode;
use warp_domain::session::Rule;
use warp_testkit::session::{Budget, Case, Mutation, Spec, explore};

const A: Spec = Spec { keys: &[0], mode: Mode::Wait };
const SKIP: Spec = Spec { keys: &[0], mode: Mode::Skip };
const B: Spec = Spec { keys: &[1], mode: Mode::Wait };
const AB: Spec = Spec { keys: &[0, 1], mode: Mode::Wait };

fn budget(change: impl Fn(&mut Budget)) -> Budget {
    let mut budget = Budget::default();
    change(&mut budget);
    budget
}

/// Nobody waits inside a host and no claim parks: every refusal comes from the lock session.
fn apart(case: Case) -> Case {
    Case { hand_offs: 0, claims_park: false, ..case }
}

/// Cases of up to some ten thousand states: in every test run.
fn small() -> Vec<Case> {
    let case = Case::new;
    vec![
        case("limit 1, 3 jobs", &[A; 3], 1),
        case("limit 2, 2 jobs", &[A; 2], 2),
        apart(case("limit 2, 3 jobs", &[A; 3], 2)),
        case("Wait + Skip + Wait", &[A, SKIP, A], 1),
        Case { budget: budget(|b| (b.deletes, b.retries) = (1, 1)), ..case("delete and retry, 2 jobs", &[A; 2], 1) },
        Case { budget: budget(|b| b.deletes = 1), claims_park: false, ..case("delete, 3 jobs", &[A; 3], 1) },
        apart(case("two keys, 3 jobs", &[AB, A, B], 1)),
        apart(case("two keys, two wide jobs", &[AB, AB], 1)),
        Case { limits: vec![2, 1], ..apart(case("limit 1→2→1, 2 jobs", &[A; 2], 1)) },
        Case { limits: vec![2], ..case("limit 1→2, 2 jobs", &[A; 2], 1) },
        Case { limits: vec![1], ..case("limit 2→1, 2 jobs", &[A; 2], 2) },
        Case { budget: budget(|b| b.crashes = 1), ..case("host crash, 2 jobs", &[A; 2], 1) },
        Case { budget: budget(|b| b.losses = 1), ..case("session lost, 2 jobs", &[A; 2], 1) },
        Case { budget: budget(|b| b.failures = 1), ..case("a call fails, 2 jobs", &[A; 2], 1) },
        Case { budget: budget(|b| b.failures = 1), ..apart(case("a call fails, two keys", &[AB, B], 1)) },
        Case { budget: budget(|b| b.freezes = 1), ..case("frozen host, 1 job", &[A], 1) },
    ]
}

/// Minutes, not seconds. Some of their mutations show early all the same.
fn large() -> Vec<Case> {
    let case = Case::new;
    vec![
        case("limit 2, 3 jobs, waiting inside", &[A; 3], 2),
        case("limit 1, 4 jobs", &[A; 4], 1),
        Case { hand_offs: 0, ..case("limit 2, 3 Wait + Skip", &[A, A, A, SKIP], 2) },
        Case { limits: vec![2], claims_park: false, ..case("limit 1→2, 3 jobs", &[A; 3], 1) },
        Case { limits: vec![1], claims_park: false, ..case("limit 2→1, 3 jobs", &[A; 3], 2) },
        Case { limits: vec![2], ..apart(case("limit 3→2, 3 jobs", &[A; 3], 3)) },
        Case { limits: vec![2, 1], ..case("limit 1→2→1, 3 jobs", &[A; 3], 1) },
        apart(case("two keys, 4 jobs", &[AB, A, B, AB], 1)),
        Case { budget: budget(|b| b.deletes = 1), ..apart(case("two keys, 3 jobs, delete", &[AB, A, B], 1)) },
        Case { budget: budget(|b| b.crashes = 1), ..case("host crash, 3 jobs", &[A; 3], 1) },
        Case { budget: budget(|b| b.losses = 1), ..case("session lost, 3 jobs", &[A; 3], 1) },
        Case { budget: budget(|b| b.losses = 2), ..case("session lost twice, 2 jobs, limit 2", &[A; 2], 2) },
        Case { budget: budget(|b| b.freezes = 1), ..case("frozen host, 2 jobs", &[A; 2], 1) },
        Case { budget: budget(|b| b.freezes = 1), ..apart(case("frozen host, 3 jobs", &[A; 3], 1)) },
        Case { budget: budget(|b| b.failures = 1), limits: vec![2], ..case("a call fails, limit 1→2, 2 jobs", &[A; 2], 1) },
        Case {
            budget: budget(|b| (b.crashes, b.losses) = (1, 1)),
            limits: vec![2, 1],
            ..apart(case("crash, session lost, limit 1→2→1, 2 jobs", &[A; 2], 1))
        },
    ]
}

fn check(cases: Vec<Case>) {
    for case in cases {
        let begun = std::time::Instant::now();
        match explore(&case) {
            Ok(explored) => println!("{:<42} {:>8} states {:>9} steps {:?}", case.name, explored.states, explored.steps, begun.elapsed()),
            Err(found) => panic!("{}: {}\n  {}", case.name, found.broken, found.path.join("\n  ")),
        }
    }
}

#[test]
fn every_interleaving_keeps_every_promise() {
    check(small());
}

/// Of all cases, or of the one that `WARP_CASE` names.
#[test]
#[ignore = "minutes; `cargo xtask soak interleavings` runs it"]
fn every_interleaving_of_large_cases_keeps_every_promise() {
    let only = std::env::var("WARP_CASE").ok();
    let cases: Vec<_> = large().into_iter().filter(|case| only.as_ref().is_none_or(|only| case.name == only)).collect();
    assert!(!cases.is_empty(), "no case {only:?}");
    check(cases);
}

const fn table(rule: Rule) -> Mutation {
    Mutation::Table(rule)
}

/// Rule, what is broken about it, the mutation, the case that shows it, and what it shows.
const TABLE: &[(&str, &str, Mutation, &str, &str)] = &[
    ("C1 (V16)", "a settle matches the job alone", Mutation::SettleIgnoresToken, "frozen host, 1 job", "P3"),
    ("C3 (V25)", "a lapsed host drops what it had not begun", table(Rule::LapseGivesAllBack), "frozen host, 1 job", "can never end"),
    ("C4 (V20)", "keys are taken in unlike orders", table(Rule::KeysInOrder), "two keys, two wide jobs", "round for ever"),
    ("C5 (V6)", "a deleted job that was woken wakes nobody", Mutation::DeleteWakesNobody, "delete, 3 jobs", "P2"),
    ("A1 (V7)", "the table is not asked", table(Rule::TableFirst), "limit 1, 3 jobs", "P1, P5"),
    ("A1 (V8)", "the table is not asked", table(Rule::TableFirst), "limit 2→1, 2 jobs", "P1, P5"),
    ("A1", "a call forgets what its earlier attempts took", Mutation::CallForgetsItself, "limit 1, 3 jobs", "P1, P5"),
    ("A2.1", "the first use of a higher limit is not recorded", Mutation::HighIsForgotten, "limit 3→2, 3 jobs", "P1, P5"),
    ("A2.3 (V9)", "nobody looks above a lowered limit", Mutation::NoLookAbove, "limit 3→2, 3 jobs", "P1, P5"),
    ("A2.5 (V10)", "the version is not read again", Mutation::NoVerify, "limit 2→1, 2 jobs", "P1, P5"),
    ("A2.5", "an exclusive lock is given back too", Mutation::VerifiesExclusive, "limit 1→2→1, 2 jobs", "P2"),
    ("A2.6", "the fence is drawn before the locks", Mutation::FenceBeforeLocks, "two keys, 3 jobs", "fences"),
    ("A3", "a refused attempt keeps its earlier keys", Mutation::RefusedKeepsEarlierKeys, "two keys, 3 jobs", "does not know"),
    ("A4 (V1)", "nobody looks after a park", table(Rule::LookAfterPark), "limit 1, 3 jobs", "P2"),
    ("A5 (V2)", "the wake comes before the unlock", table(Rule::WakeAfterUnlock), "limit 1, 3 jobs", "P2"),
    ("A6 (V17)", "an unlock wakes one", Mutation::WakesOne, "limit 1→2, 3 jobs", "P2"),
    ("A6 (V18)", "an unlock wakes by row count alone", Mutation::WakesDifferenceOnly, "Wait + Skip + Wait", "P2"),
    ("A7 (V3)", "a lock held for a moment wakes nobody", table(Rule::GiveBackWakes), "two keys, 3 jobs", "P2"),
    ("A7 (V4)", "a wake is not passed on", table(Rule::TicketPassesOn), "two keys, 4 jobs", "P2"),
    ("A8 (V14)", "a hand-off is blind to the limit", table(Rule::HandOffChecksTheVersion), "limit 2→1, 3 jobs", "P5"),
    ("A8 (V22)", "a hand-off wakes nobody", table(Rule::HandOffWakesTheDifference), "limit 1→2, 3 jobs", "P2"),
    ("A9 (V12)", "a local waiter waits for ever", table(Rule::LocalWaitIsBounded), "limit 1, 3 jobs", "can never end"),
    ("A10 (V11)", "a limit wakes in its own transaction", Mutation::LimitWakesInside, "limit 1→2, 2 jobs", "P2"),
    ("A11 (V23)", "an exclusive holder stays so under a raise", table(Rule::RaiseConverts), "limit 1→2, 2 jobs", "P2"),
    ("A12 (V24)", "the rescuer leaves the lock session", Mutation::RescuerLeavesSession, "frozen host, 1 job", "can never end"),
    ("A13", "a lost session stops nobody", table(Rule::LossStopsHolders), "frozen host, 1 job", "P3"),
    ("A13 (V13)", "an old answer goes to the new session", table(Rule::CallsBelongToTheirSession), "session lost, 2 jobs", "P1"),
    ("A13", "a failed call's locks are not found out", table(Rule::FailedCallsAreReconciled), "a call fails, 2 jobs", "does not know"),
    ("A14", "no sweep after faults", Mutation::NoSweep, "host crash, 2 jobs", "can never end"),
];

/// These need a case that takes a while.
const SLOW: &[(&str, &str, Mutation, &str, &str)] =
    &[("A4 (V26)", "the look wakes by row count", Mutation::LookWakesByRowCount, "limit 2, 3 Wait + Skip", "P2")];

fn check_mutations(table: &[(&str, &str, Mutation, &str, &str)]) {
    let mut missed = Vec::new();
    for (rule, what, mutation, name, expected) in table {
        let case = small().into_iter().chain(large()).find(|case| case.name == *name).unwrap_or_else(|| panic!("no case \"{name}\""));
        let begun = std::time::Instant::now();
        match explore(&Case { mutation: Some(*mutation), ..case }) {
            Err(found) => {
                println!("{rule:<11} {what} · \"{name}\" after {} steps: {} ({:?})", found.path.len(), found.broken, begun.elapsed());
                if !found.broken.contains(expected) {
                    missed.push(format!("{rule}: {mutation:?} showed as \"{}\"\n  {}", found.broken, found.path.join("\n  ")));
                }
            }
            Ok(explored) => missed.push(format!("{rule}: nobody noticed {mutation:?} in \"{name}\", {explored:?}, {:?}", begun.elapsed())),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn broken_rules_show_in_their_case() {
    check_mutations(TABLE);
}

#[test]
#[ignore = "a minute; `cargo xtask soak interleavings` runs it"]
fn broken_rules_show_in_a_large_case() {
    check_mutations(SLOW);
}
