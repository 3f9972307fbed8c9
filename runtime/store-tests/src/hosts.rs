//! Hosts: they come, renew, go, die.

use std::time::Duration;

use warp_domain::ending::State;
use warp_domain::{ClaimToken, JobHandle};
use warp_store::{CommandVerdict, HostSeen, Renewed, Rescued, SettleVerdict};

use crate::world::{World, done, gated, mutex, plain, settle};

/// A registration is seen by others, with what it runs and how often it has renewed; its number is never used again.
pub async fn hosts_are_seen(world: World) {
    let host = world.host(&[plain("a"), plain("b")]).await;
    world.enqueue_many("a", 3).await;
    world.claim(&host, 2).await;
    world.pass(Duration::from_secs(5));
    let seen = world.store.hosts().await.expect("hosts");
    let before = seen[0].clone();
    assert_eq!((seen.len(), before.host, before.name.as_str(), before.running), (1, host.id, "machine-1", 2));
    let told = world.renew(host.id, Vec::new()).await.hosts;
    let after = world.store.hosts().await.expect("hosts")[0].clone();
    assert_eq!(told, [HostSeen { running: 0, ..after.clone() }], "a renewal tells of every host");
    assert!(after.renewals > before.renewals);
    assert_eq!((after.started_at, after.renewed_at), (before.started_at, world.now()));
    assert_eq!(world.store.served_contracts().await.expect("served"), ["a", "b"]);
    world.store.deregister(host.id, world.now()).await.expect("deregister");
    assert_eq!(world.store.hosts().await.expect("hosts"), []);
    assert!(world.store.served_contracts().await.expect("served").is_empty());
    assert_ne!(world.host(&[plain("a")]).await.id, host.id);
}

/// C3: at a renewal, rows that the host does not know are handed back, and it hears of runs that are not its own.
pub async fn a_renewal_compares_what_both_sides_know(world: World) {
    let host = world.host(&[gated("c", 1, mutex(&["k:{n}"]))]).await;
    world.enqueue((0..3).map(|n| world.job("c", &format!("{{\"n\": {n}}}"))).collect()).await;
    let claimed = world.claim(&host, 3).await;
    let known = |at: usize| (claimed[at].handle, claimed[at].token);
    let renew = async |known: Vec<_>| {
        let Renewed { handed_back, lost, .. } = world.renew(host.id, known).await;
        (handed_back, lost)
    };
    assert_eq!(renew(vec![known(0), known(1), known(2)]).await, (0, vec![]));
    let stranger = (JobHandle(4711), ClaimToken(1));
    let outdated = (claimed[0].handle, ClaimToken(claimed[0].token.0 - 1));
    let renewed = renew(vec![known(0), stranger, known(2), outdated]).await;
    assert_eq!(renewed, (1, vec![stranger, outdated]));
    let back = world.details(claimed[1].id).await.summary;
    assert_eq!((back.state, back.attempts, back.runs), (State::Enqueued, 0, 1));
    assert_eq!(world.holders("k:1").await, [], "its slot is free");
    assert_eq!(world.exchange(&host, vec![settle(&claimed[1], done())], 0).await.settled, [SettleVerdict::Late]);
    assert_eq!(world.state(claimed[0].id).await, State::Processing);
}

/// B5: whatever a dead host ran is given back, uncharged, its slots are handed on; once.
pub async fn a_rescue_gives_everything_back(world: World) {
    let served = [gated("c", 1, mutex(&["k:{n}"])), plain("free")];
    let (dead, alive) = (world.host(&served).await, world.host(&served).await);
    let gated_ids = world.enqueue((0..4).map(|n| world.job("c", &format!("{{\"n\": {}}}", n % 2))).collect()).await;
    let free = world.enqueue_one("free").await;
    let running = world.claim(&dead, 10).await;
    assert_eq!(running.len(), 3);
    world.enqueue_one("free").await;
    let untouched = world.claim_one(&alive).await;
    let seen = world.store.hosts().await.expect("hosts").into_iter().find(|seen| seen.host == dead.id).expect("registered");
    // It renews in time: the rescuer that has seen the old number does nothing.
    let known = running.iter().map(|claimed| (claimed.handle, claimed.token)).collect();
    world.renew(dead.id, known).await;
    let missed = world.store.rescue(dead.id, seen.renewals, 5, world.now()).await.expect("rescue");
    assert_eq!(missed, Rescued::default());
    assert_eq!(world.state(free).await, State::Processing);
    assert_eq!(world.rescue(&dead).await, Rescued { requeued: 3, exhausted: 0 });
    assert_eq!(world.store.hosts().await.expect("hosts").len(), 1);
    assert_eq!(world.store.rescue(dead.id, seen.renewals + 1, 5, world.now()).await.expect("rescue"), Rescued::default());
    for claimed in &running {
        let summary = world.details(claimed.id).await.summary;
        assert_eq!((summary.state, summary.attempts, summary.runs), (State::Enqueued, 0, 1));
    }
    assert_eq!((world.holders("k:0").await, world.holders("k:1").await), (vec![gated_ids[2]], vec![gated_ids[3]]));
    assert_eq!(world.state(untouched.id).await, State::Processing, "the living are left alone");
    assert_eq!(world.counter("stats:requeued:recovery").await, 3);
    let mut ran = world.drain(&alive).await;
    ran.sort_unstable();
    assert_eq!(ran, [gated_ids, vec![free]].concat());
}

/// A job under which host after host dies is Failed in the end, and its key is free.
pub async fn a_job_that_kills_its_hosts_is_failed(world: World) {
    let id = world.enqueue_one("c").await;
    for death in 1..=3 {
        let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
        world.claim_one(&host).await;
        let seen = world.store.hosts().await.expect("hosts");
        let rescued = world.store.rescue(host.id, seen[0].renewals, 2, world.now()).await.expect("rescue");
        let expected = if death <= 2 { Rescued { requeued: 1, exhausted: 0 } } else { Rescued { requeued: 0, exhausted: 1 } };
        assert_eq!(rescued, expected, "death {death}");
    }
    let details = world.details(id).await;
    assert_eq!((details.summary.state, details.summary.runs, details.summary.attempts), (State::Failed, 3, 0));
    assert_eq!(world.counter("stats:failed:recovery-exhausted").await, 1);
    assert_eq!(world.holders("k").await, []);
    // An operator gives it another chance, with a fresh count of deaths.
    world.requeue(id, CommandVerdict::Done).await;
    let host = world.host(&[gated("c", 1, mutex(&["k"]))]).await;
    world.claim_one(&host).await;
    assert_eq!(world.rescue(&host).await, Rescued { requeued: 1, exhausted: 0 });
}

/// A host that leaves hands back what it still has.
pub async fn a_leaving_host_hands_back(world: World) {
    let served = [gated("c", 1, mutex(&["k"]))];
    let (leaving, staying) = (world.host(&served).await, world.host(&served).await);
    let ids = world.enqueue_many("c", 2).await;
    let running = world.claim_one(&leaving).await;
    world.claim(&staying, 5).await;
    world.store.deregister(leaving.id, world.now()).await.expect("deregister");
    assert_eq!(world.details(running.id).await.summary.attempts, 0);
    assert_eq!(world.holders("k").await, [ids[1]]);
    assert_eq!(world.drain(&staying).await, [ids[1], ids[0]]);
}
