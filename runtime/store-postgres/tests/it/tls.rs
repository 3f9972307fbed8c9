//! Encrypted connections: what is trusted, who is let in, and that all kinds of connections do alike.

use std::time::Duration;

use warp_store::StoreErrorKind;
use warp_store_postgres::bare::{Db, Listener};
use warp_store_postgres::{ConnectSettings, Level, StatementMode, doctor};
use warp_test_servers::{Cluster, Tls};

use crate::connections::{number, open};

const ENCRYPTED: &str = "SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl";

fn plain(cluster: &Cluster, mode: &str) -> ConnectSettings {
    let url = format!("postgres://{}@127.0.0.1:{}/postgres", cluster.user(), cluster.port());
    ConnectSettings { ssl_mode: Some(mode.to_owned()), ..ConnectSettings::new(url) }
}

async fn refused(settings: &ConnectSettings) -> String {
    let fault = Db::open(settings).await.err().unwrap_or_else(|| panic!("accepted: {settings:?}"));
    assert_eq!(fault.kind(), StoreErrorKind::Unavailable, "{}", fault.text());
    fault.text().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_mode_decides_whose_certificate_is_trusted() {
    let tls = Tls::new("postgres").expect("certificates");
    let stranger = Tls::new("postgres").expect("other certificates");
    let cluster = Cluster::functional().tls(&tls).start().expect("a cluster");

    for mode in ["prefer", "require"] {
        assert_eq!(number(&open(&plain(&cluster, mode)).await, ENCRYPTED).await, 1, "{mode}");
    }
    assert!(refused(&plain(&cluster, "disable")).await.contains("pg_hba.conf"), "the server wants encryption");
    for mode in ["verify-ca", "verify-full", "require"] {
        let trusted = ConnectSettings { ssl_root_cert: Some(tls.root()), ..plain(&cluster, mode) };
        assert_eq!(number(&open(&trusted).await, ENCRYPTED).await, 1, "{mode}");
        let not = ConnectSettings { ssl_root_cert: Some(stranger.root()), ..plain(&cluster, mode) };
        let text = refused(&not).await;
        assert!(text.to_lowercase().contains("certificate") || text.contains("UnknownIssuer"), "{mode}: {text}");
    }
    // The same in the address, in both forms.
    let pairs = format!(
        "host=localhost port={} user={} dbname=postgres sslmode=verify-full sslrootcert='{}'",
        cluster.port(),
        cluster.user(),
        tls.root().display()
    );
    assert_eq!(number(&open(&ConnectSettings::new(pairs)).await, ENCRYPTED).await, 1);
    assert_eq!(number(&open(&ConnectSettings::new(cluster.url("postgres"))).await, ENCRYPTED).await, 1);
    let missing = ConnectSettings { ssl_root_cert: Some("/nonexistent/root.pem".into()), ..plain(&cluster, "verify-full") };
    let text = refused(&missing).await;
    assert!(text.contains("root_cert") && text.contains("/nonexistent/root.pem cannot be read"), "{text}");
    // Nobody is told to look at the network, where nothing is wrong with it.
    let not = ConnectSettings { ssl_root_cert: Some(stranger.root()), ..plain(&cluster, "verify-full") };
    let text = refused(&not).await;
    assert!(text.contains("no authority that is trusted here") && text.contains("`root_cert`") && !text.contains("network"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_does_not_fit_is_told_from_one_that_is_not_trusted() {
    for (hosts, expired, parts) in [
        (&["elsewhere.example"][..], false, ["does not name that host: it is for elsewhere.example", "`verify-ca`"]),
        (&["127.0.0.1"][..], true, ["has expired", "clock"]),
    ] {
        let tls = Tls::with_server("postgres", hosts, expired).expect("certificates");
        let cluster = Cluster::functional().tls(&tls).start().expect("a cluster");
        let text = refused(&ConnectSettings { ssl_root_cert: Some(tls.root()), ..plain(&cluster, "verify-full") }).await;
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        let any_name = ConnectSettings { ssl_root_cert: Some(tls.root()), ..plain(&cluster, "verify-ca") };
        assert_eq!(Db::open(&any_name).await.is_ok(), !expired, "{hosts:?}");
    }
    let cluster = Cluster::functional().start().expect("a cluster without TLS");
    let text = refused(&plain(&cluster, "require")).await;
    assert!(text.contains("offers no TLS") && text.contains("`sslmode`"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_opens_every_kind_of_connection() {
    let tls = Tls::new("postgres").expect("certificates");
    let stranger = Tls::new("postgres").expect("other certificates");
    let cluster = Cluster::functional().tls_with_client_certificate(&tls).start().expect("a cluster");
    let with = |certificates: &Tls| ConnectSettings {
        ssl_root_cert: Some(tls.root()),
        ssl_cert: Some(certificates.client_certificate()),
        ssl_key: Some(certificates.client_key()),
        mode: StatementMode::Auto,
        ..plain(&cluster, "verify-full")
    };
    assert_eq!(number(&open(&with(&tls)).await, ENCRYPTED).await, 1);
    let listener = Listener::start(&with(&tls), None).unwrap_or_else(|fault| panic!("{}", fault.text()));
    tokio::time::timeout(Duration::from_secs(20), listener.changes().wait()).await.expect("it listens");
    let report = doctor(&with(&tls), None, || warp_domain::UnixMillis(0)).await;
    assert_eq!(report.finding("tls").expect("looked at").level, Level::Ok);
    assert!(report.finding("tls").expect("looked at").text.contains("TLSv1"), "{report:#?}");
    assert_eq!(report.finding("listen").expect("looked at").level, Level::Ok, "{report:#?}");

    let text = refused(&ConnectSettings { ssl_cert: None, ssl_key: None, ..with(&tls) }).await;
    assert!(text.contains("asks for a client certificate") && text.contains("`client_cert`"), "{text}");
    let text = refused(&with(&stranger)).await;
    assert!(text.contains("does not accept this client's certificate") && text.contains("ssl_ca_file"), "{text}");
}
