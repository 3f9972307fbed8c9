//! A database brought into a known situation by a host that these tests play: it claims and settles through the
//! store itself, so that every state can be shown without a component.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use warp_domain::ending::Ending;
use warp_domain::policy::Declared;
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, HostId, UnixMillis};
use warp_store::{ClaimParams, Claimed, ExchangeParams, HandOff, HostInfo, Lane, LogLine, RunOutput, Served, Settle, Store};

use crate::Ground;

/// The digest of the plugin that the host pretends to have.
pub(crate) const DIGEST: Digest = Digest([0xab; 32]);

/// A host on a test's database.
pub(crate) struct Stage {
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn Store>,
    host: HostId,
    lanes: Arc<[Lane]>,
}

pub(crate) fn now() -> UnixMillis {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    UnixMillis(i64::try_from(since.as_millis()).expect("before the end of time"))
}

impl Stage {
    /// Registers a host that runs `contract` from the default queue.
    pub(crate) fn new(ground: &Ground, contract: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let declarations = Arc::new(Declarations {
            contract: contract.to_owned(),
            handler: contract.to_owned(),
            digest: DIGEST,
            on_contract: Declared::default(),
            on_handler: Declared::default(),
        });
        let (store, host) = runtime.block_on(async {
            let store = ground.store().await;
            let info = HostInfo { name: "stage:1".to_owned(), version: "0".to_owned(), now: now() };
            let host = store.register(info).await.expect("registers");
            store.serve(host, vec![Served { declarations: declarations.clone() }]).await.expect("serves");
            (store, host)
        });
        Stage { runtime, store, host, lanes: vec![Lane { queue: "default".to_owned(), declarations }].into() }
    }

    fn exchange(&self, settles: Vec<Settle>, max: u32) -> Vec<Claimed> {
        let claim = (max > 0).then(|| ClaimParams { lanes: self.lanes.clone(), max });
        let params = ExchangeParams { host: self.host, now: now(), settles: settles.into(), claim, hand_off: HandOff::default() };
        self.runtime.block_on(self.store.exchange(params)).expect("exchanges").claimed
    }

    /// Claims at most `max` jobs.
    pub(crate) fn claim(&self, max: u32) -> Vec<Claimed> {
        self.exchange(Vec::new(), max)
    }

    /// Ends a run with these lines of output.
    pub(crate) fn settle(&self, run: &Claimed, ending: Ending, lines: &[(&'static str, &str)]) {
        let lines = lines.iter().map(|(stream, text)| LogLine { at: now(), stream, text: (*text).to_owned() }).collect();
        let output = RunOutput { lines, progress: vec![("rows".to_owned(), 40.0)], ..RunOutput::default() };
        let settle = Settle {
            handle: run.handle,
            token: run.token,
            on_conflict: ending.clone(),
            ending,
            output,
            children: Vec::new(),
            state: Vec::new(),
            took: Duration::from_millis(12),
        };
        self.exchange(vec![settle], 0);
    }
}

/// A document whose ids, instants, ages and digests are replaced, so that a snapshot holds its shape and the rest.
pub(crate) fn shape(value: &Value) -> String {
    fn replace(value: &Value) -> Value {
        match value {
            Value::String(text) if text.len() == 36 && text.chars().filter(|c| *c == '-').count() == 4 => "<id>".into(),
            Value::String(text) if text.len() == 24 && text.ends_with('Z') && text.contains('T') => "<time>".into(),
            Value::Array(items) => items.iter().map(replace).collect(),
            Value::Object(fields) => Value::Object(fields.iter().map(|(name, value)| (name.clone(), replace(value))).collect()),
            other => other.clone(),
        }
    }
    serde_json::to_string_pretty(&replace(value)).expect("JSON")
}
