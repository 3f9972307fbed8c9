//! Every interleaving of small cases keeps every promise, and a broken rule shows.

use warp_domain::ledger::Rule;
use warp_domain::policy::{Mode, Order};
use warp_testkit::explore::locks::{self, LockCase, LockMutation};
use warp_testkit::explore::{Budget, Case, Spec, explore};
use warp_testkit::model::Mutation;

const A: &[&str] = &["a"];
const B: &[&str] = &["b"];
const AB: &[&str] = &["a", "b"];

fn case(name: &'static str, jobs: &[Spec]) -> Case {
    Case { name, jobs: jobs.to_vec(), ..Case::default() }
}

fn wait(keys: &'static [&'static str], limit: u32) -> Spec {
    Spec::wait(keys, limit)
}

fn cases() -> Vec<Case> {
    let skip = |limit| Spec { mode: Mode::Skip, ..wait(A, limit) };
    let fifo = |keys, limit| Spec { order: Order::Fifo, ..wait(keys, limit) };
    let heavy = |limit, weight| Spec { weight, ..wait(A, limit) };
    let crash = Budget { crashes: 1, ..Budget::default() };
    let freeze = Budget { freezes: 1, ..Budget::default() };
    let delete = Budget { deletes: 1, ..Budget::default() };
    let retry = Budget { retries: 1, ..Budget::default() };
    let sweep = Budget { sweeps: 2, ..Budget::default() };
    let everything = Budget { crashes: 1, freezes: 1, deletes: 1, retries: 1, sweeps: 1, losses: 0 };
    vec![
        case("limit 1, 4 jobs", &[wait(A, 1); 4]),
        case("limit 2, 4 jobs", &[wait(A, 2); 4]),
        case("Wait + Skip + Wait", &[wait(A, 1), skip(1), wait(A, 1)]),
        Case { budget: retry, ..case("Skip that retries beside Wait", &[skip(1), wait(A, 1), skip(1)]) },
        case("Skip at limit 2 beside Wait at 1", &[skip(2), wait(A, 1), skip(2)]),
        case("two keys, 4 jobs, limit 1", &[wait(AB, 1), wait(A, 1), wait(B, 1), wait(AB, 1)]),
        case("two keys, 3 jobs, limit 2", &[wait(AB, 2), wait(A, 2), wait(AB, 2)]),
        Case { budget: delete, ..case("two keys, 3 jobs, delete", &[wait(AB, 1), wait(A, 1), wait(B, 1)]) },
        Case { limits: vec![Some(1), Some(2), Some(1), None], ..case("limit 1→2→1, 4 jobs", &[wait(A, 1); 4]) },
        Case { limits: vec![Some(3), Some(1), Some(3), None], ..case("limit 3→1→3, 4 jobs", &[wait(A, 2); 4]) },
        Case { limits: vec![Some(0), Some(2), None], ..case("paused, then 2, two keys", &[wait(A, 1), wait(AB, 1), wait(A, 2)]) },
        Case { budget: crash, ..case("host crash, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: freeze, ..case("frozen host, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: freeze, ..case("two keys, frozen host", &[wait(AB, 1), wait(A, 1), wait(B, 1)]) },
        Case { budget: sweep, ..case("unclaimed reservations, 3 jobs", &[wait(A, 1), fifo(A, 1), wait(AB, 1)]) },
        case("weights 2 and 1 at limit 2", &[heavy(2, 2), wait(A, 2), wait(A, 2), heavy(2, 2)]),
        Case { limits: vec![Some(1), None], ..case("too heavy for an admin limit", &[heavy(3, 2), wait(A, 3), wait(A, 1)]) },
        case("stamps 1, 2 and 3 on one key", &[wait(A, 1), wait(A, 2), wait(A, 3), wait(A, 2)]),
        Case { budget: retry, ..case("fifo, a head that retries", &[fifo(A, 1), fifo(A, 1), wait(A, 2)]) },
        Case { budget: Budget { retries: 2, deletes: 1, ..Budget::default() }, ..case("fifo, retries and a delete", &[fifo(A, 2); 3]) },
        Case { budget: everything, limits: vec![Some(2), None], ..case("everything, 2 jobs", &[fifo(A, 1), wait(AB, 1)]) },
    ]
}

fn inside(name: &'static str, jobs: &[Spec]) -> Case {
    Case { inside: true, ..case(name, jobs) }
}

/// B8: slots pass on inside the hosts.
fn inside_cases() -> Vec<Case> {
    let budget = |change: &dyn Fn(&mut Budget)| {
        let mut budget = Budget::default();
        change(&mut budget);
        budget
    };
    let skip = Spec { mode: Mode::Skip, ..wait(A, 1) };
    let fifo = |limit| Spec { order: Order::Fifo, ..wait(A, limit) };
    vec![
        inside("inside, limit 1, 3 jobs", &[wait(A, 1); 3]),
        inside("inside, limit 2, 3 jobs", &[wait(A, 2); 3]),
        inside("inside, two keys, 4 jobs", &[wait(A, 1), wait(A, 1), wait(B, 1), wait(B, 1)]),
        inside("inside, two keys and a wide job", &[wait(A, 1), wait(AB, 1), wait(A, 1)]),
        inside("inside, Skip", &[wait(A, 1), skip, wait(A, 1)]),
        inside("inside, stamps 1 and 3", &[wait(A, 1), wait(A, 1), wait(A, 3), wait(A, 3)]),
        inside("inside, stamps 1, 2 and 2", &[wait(A, 2), wait(A, 1), wait(A, 2)]),
        Case { budget: budget(&|b| b.retries = 1), ..inside("inside, fifo beside any, a retry", &[fifo(2), wait(A, 2), wait(A, 2)]) },
        Case { limits: vec![Some(1), None], ..inside("inside, limit 2→1, 3 jobs", &[wait(A, 2); 3]) },
        Case { limits: vec![Some(2), None], ..inside("inside, limit 1→2, 3 jobs", &[wait(A, 1); 3]) },
        Case { limits: vec![Some(0), None], ..inside("inside, paused, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: budget(&|b| b.crashes = 1), ..inside("inside, host crash, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: budget(&|b| b.freezes = 1), ..inside("inside, frozen host, 2 jobs", &[wait(A, 1); 2]) },
        Case { budget: budget(&|b| (b.deletes, b.retries) = (1, 1)), ..inside("inside, delete and retry, 2 jobs", &[wait(A, 1); 2]) },
        Case { budget: budget(&|b| b.losses = 1), ..inside("inside, lost answer, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: budget(&|b| b.sweeps = 1), ..inside("inside, unclaimed reservations, 3 jobs", &[wait(A, 1); 3]) },
    ]
}

/// Minutes, not seconds.
fn large_inside_cases() -> Vec<Case> {
    let budget = |change: &dyn Fn(&mut Budget)| {
        let mut budget = Budget::default();
        change(&mut budget);
        budget
    };
    vec![
        inside("inside, limit 1, 4 jobs", &[wait(A, 1); 4]),
        inside("inside, limit 2, 4 jobs", &[wait(A, 2); 4]),
        inside("inside, stamps 2, 2, 2 and 3", &[wait(A, 2), wait(A, 2), wait(A, 2), wait(A, 3)]),
        Case { budget: budget(&|b| b.freezes = 1), ..inside("inside, frozen host, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: budget(&|b| (b.deletes, b.retries) = (1, 1)), ..inside("inside, delete and retry, 3 jobs", &[wait(A, 1); 3]) },
        Case { budget: budget(&|b| (b.losses, b.retries) = (1, 1)), ..inside("inside, lost answer and retry, 3 jobs", &[wait(A, 1); 3]) },
        Case { limits: vec![Some(1), Some(2), None], ..inside("inside, limit 2→1→2, 4 jobs", &[wait(A, 2); 4]) },
        Case {
            budget: budget(&|b| (b.crashes, b.losses) = (1, 1)),
            limits: vec![Some(2), None],
            ..inside("inside, crash, lost answer, limit 1→2, 3 jobs", &[wait(A, 1); 3])
        },
    ]
}

fn check(cases: Vec<Case>) {
    for case in cases {
        match explore(&case) {
            Ok(explored) => {
                println!("{:<46} {:>7} states {:>8} steps", case.name, explored.states, explored.steps);
                assert!(explored.states > 50, "{}: only {explored:?}", case.name);
            }
            Err(found) => panic!("{}: {}\n  {}", case.name, found.broken, found.path.join("\n  ")),
        }
    }
}

#[test]
fn every_interleaving_keeps_every_promise() {
    check(cases());
}

#[test]
fn every_interleaving_with_local_waiters_keeps_every_promise() {
    check(inside_cases());
}

/// Of all cases, or of the one that `WARP_CASE` names.
#[test]
#[ignore = "minutes; `cargo xtask soak interleavings` runs it"]
fn every_interleaving_of_large_cases_with_local_waiters_keeps_every_promise() {
    let only = std::env::var("WARP_CASE").ok();
    check(large_inside_cases().into_iter().filter(|case| only.as_ref().is_none_or(|only| case.name == only)).collect());
}

#[test]
fn broken_rules_show_in_some_case() {
    for (rule, mutation) in [
        ("C5 (W5)", Mutation::DeleteWithoutHandOn),
        ("B2 (W4)", Mutation::Ledger(Rule::RefusedHandsOn)),
        ("B3", Mutation::SettleWithoutHandOn),
        ("B4 (W6)", Mutation::Ledger(Rule::HandOnObeysTheLimit)),
        ("B5", Mutation::RescueWithoutHandOn),
        ("B5 (W8)", Mutation::RescueSlotsFirst),
        ("B6 (W7)", Mutation::Ledger(Rule::RaiseHandsOn)),
        ("weights", Mutation::Ledger(Rule::WeightsCount)),
        ("weights", Mutation::Ledger(Rule::TooHeavyArePassedOver)),
        ("stamps", Mutation::Ledger(Rule::ExclusiveHolder)),
        ("stamps", Mutation::Ledger(Rule::OwnLimitCounts)),
        ("order", Mutation::Ledger(Rule::HeadOfLine)),
        ("fifo", Mutation::Ledger(Rule::BlockKeepsTheKey)),
        ("fifo", Mutation::StartForgetsTicket),
        ("Skip", Mutation::Ledger(Rule::SkipBeforeFirstStart)),
    ] {
        let found = cases().into_iter().find_map(|case| {
            let case = Case { mutation: Some(mutation), ..case };
            explore(&case).err().map(|found| (case.name, found))
        });
        let (name, found) = found.unwrap_or_else(|| panic!("{rule}: nobody noticed {mutation:?}"));
        println!("{rule:<10} {mutation:?} in \"{name}\" after {} steps: {}", found.path.len(), found.broken);
    }
}

/// The mutation, and the case that shows it.
const INSIDE: &[(Mutation, &str)] = &[
    (Mutation::BeginsWithoutPass, "inside, limit 1, 3 jobs"),
    (Mutation::PassAfterEnds, "inside, limit 1, 3 jobs"),
    (Mutation::EndFreesPassedSlot, "inside, limit 1, 3 jobs"),
    (Mutation::BeginsBeside, "inside, limit 1, 3 jobs"),
    (Mutation::BeginsBehind, "inside, limit 1, 3 jobs"),
    (Mutation::EndOvertakesPass, "inside, limit 1, 3 jobs"),
    (Mutation::KeepsWaiters, "inside, limit 1, 3 jobs"),
    (Mutation::WaitersWithoutSlot, "inside, limit 1, 3 jobs"),
    (Mutation::Ledger(Rule::WaitersAreTakenInOrder), "inside, limit 1, 4 jobs"),
    (Mutation::Ledger(Rule::WaitsInsideOnlyWhenFull), "inside, limit 1, 3 jobs"),
    (Mutation::Ledger(Rule::TakenWaitersHandOn), "inside, stamps 2, 2, 2 and 3"),
    (Mutation::Ledger(Rule::PassBetweenLikes), "inside, stamps 1 and 3"),
    (Mutation::Ledger(Rule::PassWithoutAdminLimit), "inside, limit 2→1, 3 jobs"),
];

/// B8, rule by rule.
#[test]
fn broken_rules_about_local_waiters_show_in_their_case() {
    let mut missed = Vec::new();
    for (mutation, name) in INSIDE {
        let all = inside_cases().into_iter().chain(large_inside_cases());
        let case = all.into_iter().find(|case| case.name == *name).unwrap_or_else(|| panic!("no case \"{name}\""));
        match explore(&Case { mutation: Some(*mutation), ..case }) {
            Err(found) => println!("{mutation:?} in \"{name}\" after {} steps: {}", found.path.len(), found.broken),
            Ok(explored) => missed.push(format!("nobody noticed {mutation:?} in \"{name}\", {explored:?}")),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn lock_cases(mutation: Option<LockMutation>) -> Vec<LockCase> {
    let case = |jobs: &[&[i64]], limit| LockCase { jobs: jobs.iter().map(|keys| keys.to_vec()).collect(), limit, mutation };
    vec![
        case(&[&[0], &[0], &[0]], 1),
        case(&[&[0], &[0], &[0], &[0]], 2),
        case(&[&[0, 1], &[0, 1], &[0, 1]], 1),
        case(&[&[0, 1], &[1], &[0]], 1),
        case(&[&[0, 1], &[1, 2], &[0, 2]], 1),
    ]
}

/// B1, C2 and C4: what makes a command one step, shown with key rows that are taken one by one.
#[test]
fn key_rows_are_taken_in_one_order_and_counted_after_that() {
    for case in lock_cases(None) {
        let states = locks::explore(&case).unwrap_or_else(|broken| panic!("{:?}: {broken}", case.jobs));
        println!("{:?} at limit {}: {states} states", case.jobs, case.limit);
        assert!(states > 50);
    }
    for (rule, mutation, expected) in [
        ("B1 (W2)", LockMutation::CountsBeforeLocking, "hold key"),
        ("C4 (W1)", LockMutation::UnlikeOrders, "wait for each other"),
        ("B4 (W1)", LockMutation::HandsOnFurtherKeys, "wait for each other"),
        ("C2 (W9)", LockMutation::ClientInside, "wait for each other"),
    ] {
        let broken = lock_cases(Some(mutation)).iter().find_map(|case| locks::explore(case).err());
        let broken = broken.unwrap_or_else(|| panic!("{rule}: nobody noticed {mutation:?}"));
        println!("{rule:<8} {mutation:?}: {broken}");
        assert!(broken.contains(expected), "{rule}: {mutation:?} showed as {broken}");
    }
}
