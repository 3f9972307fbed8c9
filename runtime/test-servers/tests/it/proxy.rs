//! The proxy breaks what it is told to break, and nothing else.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{Instant, timeout},
};
use warp_test_servers::{Proxy, database};

/// Long enough that a byte on its way would have arrived. Only what must *not* happen is waited for this long.
const SILENCE: Duration = Duration::from_millis(200);

struct Wire {
    proxy: Proxy,
    target: TcpListener,
}

impl Wire {
    async fn new() -> Self {
        let target = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let proxy = Proxy::to(target.local_addr().expect("address")).expect("proxy");
        Self { proxy, target }
    }

    /// A client and its server, with a byte that has passed each way.
    async fn connect(&self) -> (TcpStream, TcpStream) {
        let mut client = TcpStream::connect(self.proxy.address()).await.expect("connect");
        client.write_all(b"a").await.expect("write");
        let (mut server, _) = self.target.accept().await.expect("accept");
        assert_eq!(server.read_u8().await.expect("read"), b'a');
        server.write_all(b"b").await.expect("write");
        assert_eq!(client.read_u8().await.expect("read"), b'b');
        (client, server)
    }
}

#[tokio::test]
async fn frozen_it_passes_nothing_not_even_an_end_and_loses_nothing() {
    let wire = Wire::new().await;
    let (mut client, mut server) = wire.connect().await;
    wire.proxy.freeze();
    client.write_all(b"c").await.expect("the kernel takes it");
    timeout(SILENCE, server.read_u8()).await.expect_err("frozen towards the server");
    server.write_all(b"d").await.expect("the kernel takes it");
    timeout(SILENCE, client.read_u8()).await.expect_err("frozen towards the client");
    drop(client);
    timeout(SILENCE, server.read_u8()).await.expect_err("nobody hears of the end");
    let late = TcpStream::connect(wire.proxy.address()).await.expect("accepted");
    timeout(SILENCE, wire.target.accept()).await.expect_err("and not passed on");
    assert_eq!((wire.proxy.open(), wire.proxy.accepted()), (2, 2));

    wire.proxy.thaw();
    assert_eq!(server.read_u8().await.expect("read"), b'c');
    server.read_u8().await.expect_err("the end");
    wire.target.accept().await.expect("the late one");
    drop((server, late));
    wire.proxy.until_open(|open| open == 0).await;
}

#[tokio::test]
async fn it_refuses_new_connections_and_keeps_the_old() {
    let wire = Wire::new().await;
    let (mut client, mut server) = wire.connect().await;
    wire.proxy.refuse(true);
    let mut refused = TcpStream::connect(wire.proxy.address()).await.expect("the kernel accepts");
    refused.read_u8().await.expect_err("closed");
    wire.proxy.until_accepted(2).await;
    client.write_all(b"c").await.expect("write");
    assert_eq!(server.read_u8().await.expect("the old one lives"), b'c');
    wire.proxy.refuse(false);
    wire.connect().await;
}

#[tokio::test]
async fn it_closes_all_on_both_sides_and_serves_again() {
    let wire = Wire::new().await;
    let (mut client, mut server) = wire.connect().await;
    wire.proxy.close_all();
    client.read_u8().await.expect_err("closed");
    server.read_u8().await.expect_err("closed");
    wire.proxy.until_open(|open| open == 0).await;
    wire.connect().await;
    assert_eq!(wire.proxy.accepted(), 2);
}

#[tokio::test]
async fn latency_is_added_each_way_and_does_not_reorder() {
    let wire = Wire::new().await;
    let (mut client, mut server) = wire.connect().await;
    let latency = Duration::from_millis(100);
    wire.proxy.latency(latency);
    let begun = Instant::now();
    client.write_all(b"one").await.expect("write");
    client.write_all(b"two").await.expect("write");
    let mut received = [0; 6];
    server.read_exact(&mut received).await.expect("read");
    assert_eq!(&received, b"onetwo");
    assert!(begun.elapsed() >= latency, "towards the server");
    server.write_all(b"d").await.expect("write");
    client.read_u8().await.expect("read");
    assert!(begun.elapsed() >= 2 * latency, "and back");
}

/// More than every buffer on the way holds.
#[tokio::test]
async fn large_amounts_pass_whole() {
    let wire = Wire::new().await;
    let (mut client, mut server) = wire.connect().await;
    let sent: Vec<u8> = (0..20_000_000_u32).map(|at| u8::try_from(at % 251).unwrap_or_default()).collect();
    let (written, received) = tokio::join!(
        async {
            client.write_all(&sent).await?;
            client.shutdown().await
        },
        async {
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.map(|_| received)
        }
    );
    written.expect("write");
    assert!(received.expect("read") == sent, "the same bytes");
}

#[tokio::test]
async fn postgresql_is_reached_through_it() {
    let database = database();
    let proxy = Proxy::in_front_of(database.url()).expect("proxy");
    let mut connection = PgConnection::connect(&proxy.url(database.url())).await.expect("connect");
    proxy.freeze();
    timeout(SILENCE, connection.ping()).await.expect_err("a statement gets no answer");
    assert_eq!(proxy.open(), 1);
    drop(proxy);
    PgConnection::connect(database.url()).await.expect("the server itself is well");
}
