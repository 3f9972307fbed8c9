//! The plans that the driver relies on: the claim, the activation, the line of a key and the rescue read their partial
//! indexes and nothing else, before and after `ANALYZE`, however many rows have ended.

use sqlx::{Connection as _, Row as _, SqliteConnection};
use warp_store_sqlite::{OpenOptions, SqliteStore, hot_queries};

#[tokio::test]
async fn hot_queries_read_their_partial_indexes_and_nothing_else() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("warp.db");
    drop(SqliteStore::open(OpenOptions::new(&path)).await.expect("an empty store"));
    let mut conn = SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.expect("open the file");
    // A database in which nearly everything has ended, as they all are after a day.
    sqlx::raw_sql(
        "WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 5000) \
         INSERT INTO job_state (handle, lane, place, due, parked_on, ticket, host, changed_at) \
         SELECT i, i % 3, iif(i % 100 = 0, i / 100 % 5, 10), i, iif(i / 100 % 5 = 2, i % 7, NULL), i, i % 4, i FROM n",
    )
    .execute(&mut conn)
    .await
    .expect("fill");
    for analysed in [false, true] {
        if analysed {
            sqlx::raw_sql("ANALYZE").execute(&mut conn).await.expect("analyse");
        }
        for (name, query, indexes) in hot_queries() {
            let rows = sqlx::query(sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {query}"))).fetch_all(&mut conn).await.expect(name);
            let plan: Vec<String> = rows.iter().map(|row| row.get("detail")).collect();
            let text = plan.join("\n  ");
            for index in indexes {
                assert!(plan.iter().any(|step| step.contains(index)), "{name} (analysed: {analysed}) does not use {index}:\n  {text}");
            }
            for step in &plan {
                let scans_rows = ["job_state", "slot", "blocker", " s", " t", " b", " w", " i", " r", " j"]
                    .iter()
                    .any(|table| step.trim() == format!("SCAN{}{}", if table.starts_with(' ') { "" } else { " " }, table));
                assert!(!scans_rows, "{name} (analysed: {analysed}) scans a table:\n  {text}");
            }
        }
    }
}
