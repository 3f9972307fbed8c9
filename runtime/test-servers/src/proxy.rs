//! A network that can be broken: a TCP proxy in front of a server.
//!
//! What must stay true:
//! - after [`Proxy::freeze`] has returned, not one more byte arrives on either side, nor the news that a side has closed;
//!   what was under way arrives after [`Proxy::thaw`];
//! - it runs on a thread of its own, so a test that blocks its runtime does not block its network.
//!
//! What it deliberately does not do: understand the bytes, or lose some of them and pass the rest. TCP does not do that.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener as StdListener, ToSocketAddrs},
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use crate::{Error, address::Address};

/// Chunks that one direction of a connection holds back before its sender notices.
const HELD_BACK: usize = 64;
/// The largest chunk.
const CHUNK: usize = 16 * 1024;

/// What the connections shall do. Written by the methods of [`Proxy`], read by every connection.
#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    frozen: bool,
    refusing: bool,
    latency: Duration,
    /// How often all were closed. A connection ends when it was made under a smaller number.
    closings: u64,
    over: bool,
}

/// Written by the acceptor and the connections, read by the methods of [`Proxy`].
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    open: usize,
    accepted: u64,
}

/// A TCP proxy on 127.0.0.1. It begins as a good one; dropping it closes every connection.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    orders: watch::Sender<Orders>,
    counts: watch::Receiver<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// In front of this address. It need not be there yet: each new connection looks anew.
    pub fn to(target: impl ToSocketAddrs) -> Result<Self, Error> {
        let failed = |error| Error::new("start a proxy", error);
        let target =
            target.to_socket_addrs().map_err(failed)?.next().ok_or_else(|| Error::new("start a proxy", "its target has no address"))?;
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (orders, orders_seen) = watch::channel(Orders::default());
        let (counted, counts) = watch::channel(Counts::default());
        let thread = thread::Builder::new().name("test proxy".to_owned()).spawn(move || {
            // The connections end with the runtime, which ends here.
            runtime.block_on(accept(listener, target, orders_seen, counted));
        });
        Ok(Self { address, orders, counts, thread: Some(thread.map_err(failed)?) })
    }

    /// In front of the server of this URL.
    pub fn in_front_of(url: &str) -> Result<Self, Error> {
        Self::to(Address::of(url).host_and_port())
    }

    /// The same URL, through this proxy.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        Address::of(url).with_host(&self.address.to_string())
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The network is silent: open connections stay open, and nothing passes. New ones are accepted, as a queue in the
    /// kernel would, and reach nobody.
    pub fn freeze(&self) {
        self.orders.send_modify(|orders| orders.frozen = true);
    }

    /// Ends [`freeze`](Self::freeze).
    pub fn thaw(&self) {
        self.orders.send_modify(|orders| orders.frozen = false);
    }

    /// New connections are closed as soon as they are made, or no longer. Those that are open stay.
    pub fn refuse(&self, yes: bool) {
        self.orders.send_modify(|orders| orders.refusing = yes);
    }

    /// Closes every connection that is open now, on both sides.
    pub fn close_all(&self) {
        self.orders.send_modify(|orders| orders.closings += 1);
    }

    /// Every byte takes this long from one side to the other, each way.
    pub fn latency(&self, latency: Duration) {
        self.orders.send_modify(|orders| orders.latency = latency);
    }

    /// Connections that are open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.counts.borrow().open
    }

    /// Connections since the start, those counted that were refused.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.counts.borrow().accepted
    }

    /// Waits until so many connections are open. For ever, if that never comes.
    pub async fn until_open(&self, wanted: impl Fn(usize) -> bool) {
        // Fails only when the proxy's thread is gone: it has no connections then, nor will it.
        let _ = self.counts.clone().wait_for(|counts| wanted(counts.open)).await;
    }

    /// Waits until so many connections have been made. For ever, if that never comes.
    pub async fn until_accepted(&self, wanted: u64) {
        let _ = self.counts.clone().wait_for(|counts| counts.accepted >= wanted).await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.orders.send_modify(|orders| orders.over = true);
        if let Some(thread) = self.thread.take() {
            // It has nothing to panic about, and a panic in a drop would hide the test's own.
            let _ = thread.join();
        }
    }
}

async fn accept(listener: StdListener, target: SocketAddr, mut orders: watch::Receiver<Orders>, counts: watch::Sender<Counts>) {
    let Ok(listener) = TcpListener::from_std(listener) else {
        return;
    };
    loop {
        let client = tokio::select! {
            _ = orders.wait_for(|orders| orders.over) => return,
            // An error concerns one connection that has already gone, or a lack of file descriptors that may pass.
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => client,
                Err(_) => { tokio::task::yield_now().await; continue }
            },
        };
        let now = *orders.borrow();
        counts.send_modify(|counts| counts.accepted += 1);
        if now.refusing {
            continue;
        }
        counts.send_modify(|counts| counts.open += 1);
        let (mut closing, orders, counts) = (orders.clone(), orders.clone(), counts.clone());
        tokio::spawn(async move {
            tokio::select! {
                _ = closing.wait_for(|orders| orders.closings > now.closings) => {}
                // Whatever ends a connection, the other side learns of it by the close.
                _ = connection(client, target, orders) => {}
            }
            counts.send_modify(|counts| counts.open -= 1);
        });
    }
}

async fn connection(client: TcpStream, target: SocketAddr, mut orders: watch::Receiver<Orders>) -> io::Result<()> {
    not_frozen(&mut orders).await?;
    let server = TcpStream::connect(target).await?;
    // Small messages must not wait for one another here: the latency is what was asked for.
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::try_join!(one_way(from_client, to_server, orders.clone()), one_way(from_server, to_client, orders)).map(|_| ())
}

/// Passes bytes and the end of them. Returns when both have been passed, or the receiver is gone.
async fn one_way(mut from: OwnedReadHalf, to: OwnedWriteHalf, orders: watch::Receiver<Orders>) -> io::Result<()> {
    let (arrived, arrivals) = mpsc::channel(HELD_BACK);
    let read = async move {
        let mut buffer = vec![0; CHUNK];
        // A broken sender reads like one that has closed, since that news too must wait while the network is frozen.
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            if arrived.send((Instant::now(), buffer[..length].to_vec())).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    tokio::try_join!(read, deliver(arrivals, to, orders)).map(|_| ())
}

async fn deliver(
    mut arrivals: mpsc::Receiver<(Instant, Vec<u8>)>,
    mut to: OwnedWriteHalf,
    mut orders: watch::Receiver<Orders>,
) -> io::Result<()> {
    while let Some((arrived, bytes)) = arrivals.recv().await {
        let latency = orders.borrow().latency;
        sleep_until(arrived + latency).await;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            not_frozen(&mut orders).await?;
            to.writable().await?;
            // Looked at again, and held while writing: `freeze` waits for the loan and is over when it returns.
            let now = orders.borrow();
            if !now.frozen {
                match to.try_write(rest) {
                    Ok(length) => rest = &rest[length..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    not_frozen(&mut orders).await?;
    to.shutdown().await
}

async fn not_frozen(orders: &mut watch::Receiver<Orders>) -> io::Result<()> {
    orders.wait_for(|orders| !orders.frozen).await.map(|_| ()).map_err(|_| io::ErrorKind::ConnectionAborted.into())
}
