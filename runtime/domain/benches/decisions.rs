//! What the decisions of one job cost: `cargo bench -p warp-domain`.
//!
//! They run inside the claim's and the settle's transaction, while every other writer waits, so their cost is part
//! of everybody's latency.

use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use warp_domain::key::{Found, KeyTemplate, Path, Payload};
use warp_domain::ledger::{Candidate, KeyState, Ledger, Verdict, Want};
use warp_domain::policy::{Mode, Order};
use warp_domain::{JobHandle, KeyId};

fn candidate(job: i64, key: i64, limit: u32) -> Candidate {
    Candidate {
        job: JobHandle(job),
        wants: vec![Want { key: KeyId(key), limit, weight: 1 }],
        mode: Mode::Wait,
        order: Order::Any,
        ticket: None,
        reserved: false,
        has_started: false,
    }
}

/// 256 candidates over 100 mutex keys, then every start released, which hands its key on: one busy exchange.
fn exchange(c: &mut Criterion) {
    let keys = || -> BTreeMap<KeyId, KeyState> { (0..100).map(|key| (KeyId(key), KeyState::default())).collect() };
    c.bench_function("256 claims and their releases on 100 mutex keys", |bench| {
        bench.iter_batched(
            || Ledger::new(keys(), 1),
            |mut ledger| {
                let started: Vec<_> = (0..256).filter(|job| ledger.claim(&candidate(*job, job % 100, 1)) == Verdict::Start).collect();
                for job in started {
                    ledger.release(JobHandle(job), &[KeyId(job % 100)]);
                }
                black_box(ledger.take_effects())
            },
            BatchSize::SmallInput,
        );
    });
}

struct OneField;

impl Payload for OneField {
    fn find(&self, _: &Path) -> Found<'_> {
        Found::Scalar("4711".into())
    }
    fn field_names(&self) -> Vec<String> {
        vec!["customer_id".to_owned()]
    }
}

fn render(c: &mut Criterion) {
    let Ok(template) = "payment:{customer_id}".parse::<KeyTemplate>() else { return };
    c.bench_function("render a key with one field", |bench| bench.iter(|| black_box(template.render(&OneField))));
}

criterion_group!(benches, exchange, render);
criterion_main!(benches);
