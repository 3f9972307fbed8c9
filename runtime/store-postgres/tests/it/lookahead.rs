//! What a claim has looked up and not got to, the next one brings. What has happened to it meanwhile counts all the same.

use std::sync::Arc;

use sqlx::Connection as _;
use sqlx::postgres::PgConnection;
use warp_domain::JobId;
use warp_domain::resolve::Declarations;
use warp_store_postgres::StatementMode;
use warp_store_tests::{Host, Subject, World, gated, hand_back, mutex};
use warp_test_servers::{Database, database};

use crate::conformance::another;

/// A host that has claimed the first of so many jobs and looked at the others, beside a host of another process.
async fn looked_up(jobs: usize, served: Declarations, other: Declarations) -> (World, Host, World, Host, Vec<JobId>, Arc<Database>) {
    let database = Arc::new(tokio::task::spawn_blocking(database).await.expect("an empty database"));
    let world = || async {
        let store = Arc::new(another(&database, StatementMode::Prepared).await);
        World::new(Subject { store, keep: Box::new(Arc::clone(&database)) })
    };
    let (here, there) = (world().await, world().await);
    let host = here.host(&[served]).await;
    let ids = here.enqueue_many("c", jobs).await;
    let first = here.claim_one(&host).await;
    assert_eq!(first.id, ids[0]);
    here.complete(&host, &first).await;
    let other_host = there.host(&[other]).await;
    (here, host, there, other_host, ids, database)
}

/// The host looked at the second job when it had no stamp. By the time it claims it, another host has stamped it under
/// another version, with another key.
#[tokio::test]
async fn a_stamp_that_another_host_has_written_meanwhile_counts() {
    let (served, other) = (gated("c", 1, mutex(&["k"])), gated("c", 2, mutex(&["other"])));
    let (here, host, there, other_host, ids, _database) = looked_up(10, served, other).await;
    let second = there.claim_one(&other_host).await;
    assert_eq!(second.id, ids[1]);
    there.end(&other_host, &second, hand_back()).await;
    let again = here.claim_one(&host).await;
    assert_eq!((again.id, again.run), (ids[1], 2));
    assert_eq!(again.stamp, second.stamp, "the policy that it was stamped with is its policy");
    assert_eq!(here.details(ids[1]).await.keys, ["other"]);
    assert_eq!(here.holders("other").await, [ids[1]]);
    // Those that nobody has stamped follow the version of whoever starts them.
    let third = here.claim_one(&host).await;
    assert_eq!((third.id, here.details(third.id).await.keys), (ids[2], vec!["k".to_owned()]));
}

/// A payload never changes; here one does, to show who still asks for it.
#[tokio::test]
async fn what_was_looked_up_is_not_asked_for_again_but_under_another_version() {
    let (served, other) = (gated("c", 1, mutex(&["k"])), gated("d", 1, mutex(&["k"])));
    let (here, host, _there, _other, ids, database) = looked_up(10, served, other).await;
    let mut conn = PgConnection::connect(database.url()).await.expect("a connection");
    sqlx::raw_sql("UPDATE warp.job SET payload = '\"changed\"'").execute(&mut conn).await.expect("changed");
    let second = here.claim_one(&host).await;
    assert_eq!(second.id, ids[1]);
    assert_ne!(&*second.payload, "\"changed\"", "the claim before this one has read it");
    here.complete(&host, &second).await;
    let newer = here.serve(host.id, &[gated("c", 2, mutex(&["k"]))]).await;
    let third = here.claim_one(&newer).await;
    assert_eq!((third.id, &*third.payload), (ids[2], "\"changed\""), "what the older version made of it is forgotten");
}
