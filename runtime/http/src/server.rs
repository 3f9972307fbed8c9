//! Sockets: accepting, limits, and the routes.
//!
//! axum's own `serve` sets no limit on how long a head may take or how many connections there are, so connections are
//! accepted here.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderName, StatusCode, header};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;

use crate::{Sources, metrics, probes};

/// What those who ask may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A head that takes longer, or a connection that is silent for so long, is cut off.
    pub head_within: Duration,
    /// What takes longer is answered with 503. Longer than the database is waited for.
    pub answer_within: Duration,
    /// Whoever neither reads nor leaves gives his place back at last. A scraper that keeps its connection opens a new one.
    pub connection_within: Duration,
    /// Scrapers and probes are few; more wait in the system's queue.
    pub connections: usize,
    /// Nothing here takes a body.
    pub body_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            head_within: Duration::from_secs(10),
            answer_within: Duration::from_secs(10),
            connection_within: Duration::from_secs(600),
            connections: 32,
            body_bytes: 1 << 10,
        }
    }
}

/// After a failed accept (out of file descriptors) another is not tried at once.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A bound address that is not served yet.
pub struct Server {
    listener: TcpListener,
    limits: Limits,
}

impl Server {
    /// Binds the address, so that one in use is found before the host starts.
    ///
    /// # Errors
    /// What the system says.
    pub async fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        Ok(Server { listener: TcpListener::bind(address).await?, limits })
    }

    /// The address with the port that was chosen.
    ///
    /// # Errors
    /// What the system says.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers until it is dropped. Dropping it cuts every connection and leaves nothing behind.
    pub async fn serve(self, sources: Sources) -> Infallible {
        let limits = self.limits;
        let routes = routes(sources, limits);
        let places = Arc::new(Semaphore::new(limits.connections));
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { unreachable!("nobody closes the semaphore") };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let routes = routes.clone();
                    connections.spawn(async move {
                        let _place = place;
                        // However it ends, it is over.
                        let _ = time::timeout(limits.connection_within, connection(stream, routes, limits)).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection for metrics and probes");
                    time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    }
}

async fn connection(stream: TcpStream, routes: Router, limits: Limits) -> Result<(), hyper::Error> {
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_within)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
        .await
}

const TEXT: &str = "text/plain; charset=utf-8";

fn heads(content_type: &'static str) -> [(HeaderName, &'static str); 2] {
    [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-store")]
}

fn routes(sources: Sources, limits: Limits) -> Router {
    let metrics = Arc::new(metrics::Metrics::new(sources.clone()));
    let probes = Arc::new(probes::Probes::new(sources));
    Router::new()
        .route("/metrics", get(async move || (heads(metrics::CONTENT_TYPE), metrics.text().await)))
        .route("/live", get(async move || (heads(TEXT), "live\n")))
        .route(
            "/ready",
            get(async move || {
                let found = probes.ready().await;
                let code = if found.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                (code, heads(TEXT), found.to_string())
            }),
        )
        .layer(RequestBodyLimitLayer::new(limits.body_bytes))
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, limits.answer_within))
}
