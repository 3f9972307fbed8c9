//! Metrics and probes of a real host.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};

use crate::Ground;

on_each_database! {
    a_host_tells_how_it_is
}

/// A host with its address, stopped when dropped.
struct Host(Child);

impl Drop for Host {
    fn drop(&mut self) {
        // One that has ended already is what a test wants.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connects");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sends");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("reads");
    answer
}

fn a_host_tells_how_it_is(ground: &Ground) {
    std::fs::create_dir(ground.path("plugins")).expect("a directory");
    let mut command = ground.command();
    command.args(["run", "--http", "127.0.0.1:0"]).stderr(Stdio::piped());
    let mut host = Host(command.spawn().expect("the program starts"));
    let mut lines = BufReader::new(host.0.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let first = lines.next().expect("a line");
    let address = first.strip_prefix("metrics and probes at http://").unwrap_or_else(|| panic!("{first}"));
    // It is bound before the database is opened, and answers once the host is about to run.
    assert!(get(address, "/live").starts_with("HTTP/1.1 200 "));
    let ready = get(address, "/ready");
    assert!(
        ready.starts_with("HTTP/1.1 503 ") && ready.contains("database: answers\n") && ready.ends_with("contracts: 0 served\n"),
        "{ready}"
    );
    ground.run(&["enqueue", "c", "--payload", "{}"]).good();
    let metrics = get(address, "/metrics");
    let kind = if ground.on_server() { "postgres" } else { "sqlite" };
    assert!(metrics.contains(&format!("database=\"{kind}\",locks=\"ledger\"}} 1.0\n")), "{metrics}");
    assert!(metrics.contains("warp_jobs{state=\"Enqueued\"} 1.0\n") && metrics.ends_with("# EOF\n"), "{metrics}");
    assert_eq!(metrics.contains("warp_pool_connections_most 5.0\n"), ground.on_server(), "{metrics}");
}

#[test]
fn an_address_in_use_stops_the_start() {
    let ground = Ground::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let stderr = ground.run(&["run", "--http", &address]).bad(1);
    assert!(stderr.starts_with(&format!("error: failed to listen on {address} (from --http): Address already in use")), "{stderr}");
    assert!(!ground.path("warp.db").exists(), "nothing was begun");
}
