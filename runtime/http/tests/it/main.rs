//! The server over real sockets, for a host on the in-memory store.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use warp_domain::ending::{Outcome, Said};
use warp_domain::policy::Declared;
use warp_domain::resolve::Declarations;
use warp_domain::{Digest, JobId, UnixMillis};
use warp_http::{Limits, Server, Sources};
use warp_pipeline::{AttemptInfo, Handler, HostCalls, StopSignal};
use warp_store::{NewJob, Store as _};
use warp_testkit::store::ModelStore;
use warp_worker::{Catalog, Host, HostConfig, Offer, StopLevel, Surroundings};

/// A host that runs one contract, and its server.
struct Ground {
    address: SocketAddr,
    store: Arc<ModelStore>,
    host: Option<Host>,
    stop: watch::Sender<StopLevel>,
    /// A run ends with each permit.
    gate: Arc<Semaphore>,
}

/// Ends when somebody opens its gate.
struct Gated(Arc<Semaphore>);

#[async_trait]
impl Handler for Gated {
    async fn run(&self, _: AttemptInfo, _: Arc<dyn HostCalls>, _: Arc<StopSignal>) -> Outcome {
        self.0.acquire().await.expect("nobody closes it").forget();
        Outcome::Said(Said::Completed(None))
    }
}

/// Serves contracts by name.
struct Fixed(&'static [&'static str], Arc<Semaphore>);

#[async_trait]
impl Catalog for Fixed {
    fn offers(&self) -> Vec<Offer> {
        let offer = |name: &&str| Offer {
            declarations: Arc::new(Declarations {
                contract: (*name).to_owned(),
                handler: (*name).to_owned(),
                digest: Digest([1; 32]),
                on_contract: Declared::default(),
                on_handler: Declared::default(),
            }),
            handler: Arc::new(Gated(self.1.clone())),
        };
        self.0.iter().map(offer).collect()
    }

    async fn changed(&self) {
        std::future::pending().await
    }
}

#[derive(Default)]
struct Clock(AtomicU64);

impl Surroundings for Clock {
    fn now(&self) -> UnixMillis {
        UnixMillis(1_000_000)
    }

    fn boot(&self) -> Duration {
        Duration::from_secs(100)
    }

    fn new_id(&self) -> JobId {
        JobId(u128::from(self.0.fetch_add(1, Ordering::Relaxed)))
    }

    fn draw(&self) -> u16 {
        500
    }
}

impl Ground {
    async fn new(contracts: &'static [&'static str]) -> Self {
        Self::with(contracts, Limits::default()).await
    }

    async fn with(contracts: &'static [&'static str], limits: Limits) -> Self {
        let gate = Arc::new(Semaphore::new(0));
        let (store, catalog, clock) = (Arc::new(ModelStore::new()), Arc::new(Fixed(contracts, gate.clone())), Arc::new(Clock::default()));
        let (stop, stopped) = watch::channel(StopLevel::Run);
        let guests = tokio::runtime::Handle::current();
        let host = Host::new(HostConfig::new("test:1", 2), store.clone(), catalog.clone(), clock.clone(), guests, stopped);
        let server = Server::bind("127.0.0.1:0".parse().expect("an address"), limits).await.expect("a free port");
        let address = server.address().expect("bound");
        tokio::spawn(server.serve(Sources {
            store: store.clone(),
            numbers: host.numbers(),
            catalog,
            surroundings: clock,
            pool: None,
            workers: 2,
            version: "0",
            database: "model",
            locks: "ledger",
        }));
        Ground { address, store, host: Some(host), stop, gate }
    }

    /// Sends bytes and reads until the server closes.
    async fn say(&self, bytes: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.expect("connects");
        stream.write_all(bytes.as_bytes()).await.expect("sends");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("reads");
        answer
    }

    async fn get(&self, path: &str) -> String {
        self.say(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
    }
}

fn starts(answer: &str, with: &str) {
    assert!(answer.starts_with(with), "{answer}");
}

#[tokio::test]
async fn a_host_without_a_lease_lives_and_is_not_ready() {
    let ground = Ground::new(&["a"]).await;
    starts(&ground.get("/live").await, "HTTP/1.1 200 ");
    let answer = ground.get("/ready").await;
    starts(&answer, "HTTP/1.1 503 ");
    let found = "\r\n\r\nnot ready\nhost: not registered; it registers as soon as it can\ndatabase: answers\ncontracts: 1 served\n";
    assert!(answer.ends_with(found), "{answer}");
    let answer = ground.get("/metrics").await;
    assert!(answer.contains("warp_database_up 1.0\n") && !answer.contains("warp_lease_age_seconds"), "{answer}");
}

#[tokio::test]
async fn a_running_host_is_ready_if_it_has_something_to_run() {
    for (contracts, code) in [(&["a"][..], "HTTP/1.1 200 "), (&[][..], "HTTP/1.1 503 ")] {
        let mut ground = Ground::new(contracts).await;
        let host = ground.host.take().expect("not started yet");
        let numbers = host.numbers();
        let running = tokio::spawn(host.run());
        while !numbers.lease_is_good() {
            tokio::task::yield_now().await;
        }
        starts(&ground.get("/ready").await, code);
        let answer = ground.get("/metrics").await;
        assert!(answer.contains("\r\ncontent-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"), "{answer}");
        assert!(answer.contains("warp_lease_age_seconds 0.0\n") && answer.ends_with("# EOF\n"), "{answer}");
        ground.stop.send(StopLevel::Now).expect("the host listens");
        running.await.expect("no panic").expect("it stops");
        starts(&ground.get("/ready").await, "HTTP/1.1 503 ");
    }
}

#[tokio::test]
async fn a_host_that_was_told_to_stop_is_not_ready_and_lives_while_its_runs_end() {
    let mut ground = Ground::new(&["a"]).await;
    let host = ground.host.take().expect("not started yet");
    let numbers = host.numbers();
    let running = tokio::spawn(host.run());
    let job = NewJob {
        id: JobId(1),
        contract: "a".to_owned(),
        queue: "default".to_owned(),
        payload: "1".to_owned(),
        metadata: Vec::new(),
        trace_parent: None,
        due: None,
        explicit: Declared::default(),
        unique_key: None,
    };
    ground.store.enqueue(vec![job], UnixMillis(1_000_000)).await.expect("enqueued");
    while numbers.report().running == 0 {
        tokio::task::yield_now().await;
    }
    starts(&ground.get("/ready").await, "HTTP/1.1 200 ");
    ground.stop.send(StopLevel::Graceful).expect("the host listens");
    let answer = ground.get("/ready").await;
    starts(&answer, "HTTP/1.1 503 ");
    assert!(answer.ends_with("\r\n\r\nnot ready\nhost: stopping; it claims nothing any more\ncontracts: 1 served\n"), "{answer}");
    starts(&ground.get("/live").await, "HTTP/1.1 200 ");
    assert_eq!((numbers.report().running, running.is_finished()), (1, false), "it runs as before");
    ground.gate.add_permits(1);
    running.await.expect("no panic").expect("it stops");
    starts(&ground.get("/ready").await, "HTTP/1.1 503 ");
}

#[tokio::test]
async fn what_is_too_large_or_unknown_is_refused() {
    let ground = Ground::new(&[]).await;
    starts(&ground.get("/").await, "HTTP/1.1 404 ");
    starts(&ground.say("POST /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await, "HTTP/1.1 405 ");
    starts(&ground.say("GET /live HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\nconnection: close\r\n\r\n").await, "HTTP/1.1 413 ");
    starts(&ground.say("this is not http\r\n\r\n").await, "HTTP/1.1 400 ");
}

#[tokio::test]
async fn a_head_that_does_not_end_is_cut_off_and_gives_its_place_back() {
    let ground = Ground::with(&[], Limits { head_within: Duration::from_millis(50), connections: 1, ..Limits::default() }).await;
    let mut slow = TcpStream::connect(ground.address).await.expect("connects");
    slow.write_all(b"GET /live HTTP/1.1\r\nhost:").await.expect("sends");
    // The one place is taken until then.
    starts(&ground.get("/live").await, "HTTP/1.1 200 ");
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).await.expect("it is closed, not reset");
}
