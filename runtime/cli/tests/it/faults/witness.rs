//! The outside ledger: what the guests wrote down, in a database that no host knows, and the questions that are asked
//! of it in SQL.
//!
//! Guests cannot speak to a database, so each attempt writes files (see the ledger guest), and the test loads them here
//! when all is over. Everything of a test runs on one machine and reads one clock: guests, hosts and the test write
//! nanoseconds of its wall clock, so instants of all of them can be compared.
//!
//! With the ledger as slots nothing is excused but what runs on in a process that stood still. With session locks an
//! attempt may also overlap whose host's lock session was ended from outside, until the host has noticed (its log says
//! when) and has stopped it. How long each of the two takes is checked, and that nothing begins on that host until every
//! other would have noticed too.
//!
//! What must stay true: an interval is never longer than the attempt was. It begins with the guest's first instruction
//! and ends with its last; or, where it was stopped or its host killed or frozen, with the last sign of life (one every
//! 10 ms) before that. What overlaps here has overlapped.

use std::path::Path;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use warp_test_servers::Database;

/// `allowed` is how many may hold the key at once, as far as anybody can tell from outside. A limit that changes: no start
/// may find more than the largest limit in force since the job was admitted, and it was admitted after each change that
/// did not find it among the holders.
const SCHEMA: &str = "
    CREATE TABLE attempt (job text, run int, token bigint, key text, host text, started bigint, alive bigint, ended bigint, PRIMARY KEY (job, run));
    CREATE TABLE job (job text PRIMARY KEY, key text, state text, attempts int, accepted int);
    -- Killed, or frozen, at that instant.
    CREATE TABLE gone (host text, at bigint);
    -- A limit that may be in force from `since` on, and is from `until` on.
    CREATE TABLE rule (number int, key text, slots int, since bigint, until bigint);
    CREATE TABLE held (number int, job text);
    -- A lock session was ended from outside at that instant. Its host had told its number by then, or it was only being begun.
    CREATE TABLE cut (backend int, at bigint, told bool);
    -- A host noticed then that its lock session was gone.
    CREATE TABLE noticed (host text, backend int, at bigint);
    -- How long after it came into force a limit may not have been heard of by a host that hands its slots on.
    CREATE TABLE lag (nanos bigint);
    CREATE VIEW span AS
        SELECT a.*, least(coalesce(a.ended, a.alive, a.started), g.at) AS finished
          FROM attempt a LEFT JOIN LATERAL (SELECT min(g.at) AS at FROM gone g WHERE g.host = a.host AND g.at >= a.started) g ON true;
    CREATE VIEW crowd AS
        SELECT e.key, e.job, e.run, e.at, e.change, sum(e.change) OVER (PARTITION BY e.key ORDER BY e.at, e.change) AS count
          FROM (SELECT key, job, run, started AS at, 1 AS change FROM span UNION ALL SELECT key, job, run, finished, -1 FROM span) e;
    CREATE INDEX ON rule (key, number);
    CREATE INDEX ON held (number, job);
    CREATE VIEW allowed AS
        SELECT a.job, a.run, max(r.slots) AS slots
          FROM attempt a
          LEFT JOIN LATERAL (SELECT s.number FROM rule s
                              WHERE s.key = a.key AND s.until + (SELECT coalesce(max(nanos), 0) FROM lag) <= a.started
                                AND NOT EXISTS (SELECT FROM held h WHERE h.number = s.number AND h.job = a.job)
                              ORDER BY s.number DESC LIMIT 1) f ON true
          JOIN rule r ON r.key = a.key AND r.since <= a.started AND r.number >= coalesce(f.number, 0)
         GROUP BY a.job, a.run;
    -- More than may be.
    CREATE VIEW overlap AS
        SELECT c.*, w.slots FROM crowd c JOIN allowed w ON w.job = c.job AND w.run = c.run WHERE c.change = 1 AND c.count > w.slots;
    -- When a lock session was ended, and when its host knew.
    CREATE VIEW loss AS
        SELECT n.host, c.at, n.at AS noticed
          FROM cut c JOIN LATERAL (SELECT * FROM noticed n WHERE n.backend = c.backend AND n.at >= c.at ORDER BY n.at LIMIT 1) n ON true;
    -- A13: not noticed for longer than is allowed (`locks::NOTICE`).
    CREATE VIEW unnoticed AS
        SELECT c.* FROM cut c
         WHERE c.told AND NOT EXISTS (SELECT FROM noticed n WHERE n.backend = c.backend AND n.at BETWEEN c.at AND c.at + 3000000000);
    -- Attempts whose lock session was gone, and how long they went on after their host knew. A stop takes 50 ms where the
    -- processors are idle, and may take a second (`locks::STOP`).
    CREATE VIEW lingering AS
        SELECT s.*, l.at AS cut, l.noticed, s.finished - l.noticed AS nanos
          FROM span s JOIN loss l ON l.host = s.host AND s.started <= l.noticed + 1000000000 AND s.finished > l.at;
    CREATE VIEW overtime AS SELECT * FROM lingering l WHERE l.nanos > 1000000000;
    -- A13 (b): begun although not every session that may have died with this one must have been noticed.
    CREATE VIEW early AS
        SELECT s.*, (s.started - l.noticed) / 1e6 AS after_ms
          FROM span s JOIN loss l ON l.host = s.host AND s.started > l.noticed + 1000000000 AND s.started < l.noticed + 4000000000;
    -- Beside an attempt whose host had just lost its lock session: the one exception of session locks.
    CREATE VIEW excused AS
        SELECT o.* FROM overlap o
         WHERE EXISTS (SELECT FROM lingering s WHERE s.key = o.key AND s.started <= o.at AND s.finished > o.at
                          AND o.at BETWEEN s.cut AND s.noticed + 1000000000);
    CREATE VIEW unexcused AS SELECT * FROM overlap EXCEPT SELECT * FROM excused;
    -- Who was there, since when, and how long ago the lock session of each had been ended.
    CREATE VIEW beside AS
        SELECT u.key, u.slots, s.job, s.run, s.token, s.host, (u.at - s.started) / 1e6 AS since_ms, (s.finished - u.at) / 1e6 AS left_ms, s.ended IS NULL AS cut_short,
               (SELECT (u.at - max(l.at)) / 1e6 FROM loss l WHERE l.host = s.host AND l.at <= u.at) AS since_cut_ms,
               (SELECT (u.at - max(l.noticed)) / 1e6 FROM loss l WHERE l.host = s.host AND l.noticed <= u.at) AS since_noticed_ms
          FROM unexcused u JOIN span s ON s.key = u.key AND s.started <= u.at AND s.finished > u.at;
    -- Not done, not charged once, or done without a guest that came to its end.
    CREATE VIEW lost AS
        SELECT j.* FROM job j LEFT JOIN attempt a ON a.job = j.job AND a.run = j.accepted
         WHERE j.state <> 'Completed' OR j.attempts <> 1 OR a.ended IS NULL;
    -- The end of a run was taken although a later one had begun.
    CREATE VIEW late AS
        SELECT j.* FROM job j JOIN attempt a ON a.job = j.job AND a.run > j.accepted;
    -- Of two holders of a mutex the later one has no larger token.
    CREATE VIEW misordered AS
        SELECT o.* FROM (SELECT a.key, a.job, a.run, a.token, lag(a.token) OVER (PARTITION BY a.key ORDER BY a.started) AS before
                           FROM attempt a JOIN (SELECT key FROM rule GROUP BY key HAVING max(slots) = 1) r ON r.key = a.key) o
         WHERE o.before >= o.token;
";

/// Views that are empty where everything is well, and what it means when one is not.
const PROMISES: [(&str, &str); 7] = [
    ("lost", "a job was lost, charged twice or never done"),
    ("late", "the end of a run was taken after a later one had begun"),
    ("beside", "more attempts than the key's limit ran at once"),
    ("misordered", "a later holder has the smaller fencing token"),
    ("unnoticed", "a host did not notice in time that its lock session was gone"),
    ("overtime", "an attempt went on long after its host knew that its lock session was gone"),
    ("early", "an attempt began although others might not have noticed yet that their lock sessions were gone"),
];

/// One change of a limit, as the test saw it.
pub(super) struct Rule {
    pub(super) key: String,
    pub(super) slots: u32,
    pub(super) since: u64,
    pub(super) until: u64,
    /// Who held a slot when it came into force.
    pub(super) held: Vec<String>,
}

impl Rule {
    /// What a manifest declares.
    pub(super) fn fixed(key: String, slots: u32) -> Self {
        Rule { key, slots, since: 0, until: 0, held: Vec::new() }
    }
}

/// One end of a lock session from outside.
pub(super) struct Cut {
    pub(super) backend: i32,
    pub(super) at: u64,
    /// Whether its host had told its number by then.
    pub(super) told: bool,
}

/// How a job ended, as the database of the hosts says.
pub(super) struct Verdict {
    pub(super) job: String,
    pub(super) key: String,
    pub(super) state: String,
    pub(super) attempts: u32,
    /// The run whose end was taken, as its guest said it.
    pub(super) accepted: Option<i32>,
}

/// The second database.
pub(super) struct Witness {
    _database: Database,
    conn: PgConnection,
}

impl Witness {
    pub(super) async fn new(database: Database) -> Self {
        let mut conn = PgConnection::connect(database.url()).await.expect("the second database");
        sqlx::raw_sql(SCHEMA).execute(&mut conn).await.expect("its tables");
        Witness { _database: database, conn }
    }

    /// Loads what the guests wrote into this folder.
    pub(super) async fn load(&mut self, folder: &Path) {
        let [mut jobs, mut runs, mut tokens] = [const { Vec::<String>::new() }; 3];
        let [mut keys, mut hosts] = [const { Vec::<String>::new() }; 2];
        let (mut started, mut alive, mut ended) = (Vec::<i64>::new(), Vec::<Option<i64>>::new(), Vec::<Option<i64>>::new());
        for file in std::fs::read_dir(folder).expect("a folder") {
            let path = file.expect("an entry").path();
            if path.extension().is_none_or(|suffix| suffix != "start") {
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a file");
            let mut words = text.split(' ');
            let (Some(Ok(at)), Some(key), Some(host)) = (words.next().map(str::parse), words.next(), words.next()) else {
                // Its host was killed between making the file and writing it: its work had not begun.
                continue;
            };
            let stem = path.file_stem().expect("a name").to_str().expect("UTF-8");
            let mut parts = stem.rsplitn(3, '-');
            let (token, run, job) = (parts.next(), parts.next(), parts.next().expect("three parts"));
            jobs.push(job.to_owned());
            runs.push(run.expect("three parts").to_owned());
            tokens.push(token.expect("three parts").to_owned());
            keys.push(key.to_owned());
            hosts.push(host.to_owned());
            started.push(at);
            let instant = |line: &str| line.split(' ').next().and_then(|word| word.parse().ok());
            ended.push(std::fs::read_to_string(path.with_extension("end")).ok().as_deref().and_then(instant));
            let signs = std::fs::read_to_string(path.with_extension("alive")).unwrap_or_default();
            // The last line may be torn.
            alive.push(signs.rsplit_once('\n').and_then(|(lines, _)| lines.lines().last().and_then(instant)));
        }
        sqlx::query(
            "INSERT INTO attempt (job, run, token, key, host, started, alive, ended)
             SELECT u.job, u.run::int, u.token::bigint, u.key, u.host, u.started, u.alive, u.ended
               FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) u (job, run, token, key, host, started, alive, ended)",
        )
        .bind(jobs)
        .bind(runs)
        .bind(tokens)
        .bind(keys)
        .bind(hosts)
        .bind(started)
        .bind(alive)
        .bind(ended)
        .execute(&mut self.conn)
        .await
        .expect("attempts, each under a number of its own");
    }

    pub(super) async fn verdicts(&mut self, verdicts: &[Verdict]) {
        for Verdict { job, key, state, attempts, accepted } in verdicts {
            sqlx::query("INSERT INTO job (job, key, state, attempts, accepted) VALUES ($1, $2, $3, $4, $5)")
                .bind(job)
                .bind(key)
                .bind(state)
                .bind(i64::from(*attempts))
                .bind(accepted)
                .execute(&mut self.conn)
                .await
                .expect("a job");
        }
    }

    /// From then on nothing of this host can have gone on.
    pub(super) async fn gone(&mut self, host: &str, at: u64) {
        let add = sqlx::query("INSERT INTO gone (host, at) VALUES ($1, $2)").bind(host).bind(nanos(at));
        add.execute(&mut self.conn).await.expect("a host");
    }

    /// A lock session was ended then.
    pub(super) async fn cut(&mut self, Cut { backend, at, told }: &Cut) {
        let add = sqlx::query("INSERT INTO cut (backend, at, told) VALUES ($1, $2, $3)").bind(backend).bind(nanos(*at)).bind(told);
        add.execute(&mut self.conn).await.expect("a cut");
    }

    /// What a host's log says about the losses of its lock sessions.
    pub(super) async fn losses(&mut self, host: &str, log: &[String]) {
        for line in log {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let at = line["timestamp"].as_str().expect("an instant");
            let backend = line["fields"]["backend"].as_i64().expect("a number");
            let add =
                "INSERT INTO noticed (host, backend, at) VALUES ($1, $2, (extract(epoch FROM $3::text::timestamptz) * 1000000000)::bigint)";
            let add = sqlx::query(add).bind(host).bind(backend).bind(at);
            add.execute(&mut self.conn).await.expect("a loss");
        }
    }

    /// The changes of limits, in their order.
    pub(super) async fn rules(&mut self, rules: &[Rule]) {
        for (number, Rule { key, slots, since, until, held }) in rules.iter().enumerate() {
            let number = i64::try_from(number).expect("a small number") + 1;
            let add = sqlx::query("INSERT INTO rule (number, key, slots, since, until) VALUES ($1, $2, $3, $4, $5)");
            let add = add.bind(number).bind(key).bind(i64::from(*slots)).bind(nanos(*since)).bind(nanos(*until));
            add.execute(&mut self.conn).await.expect("a rule");
            let add = sqlx::query("INSERT INTO held (number, job) SELECT $1, unnest($2)").bind(number).bind(held);
            add.execute(&mut self.conn).await.expect("holders");
        }
    }

    pub(super) async fn execute(&mut self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.conn).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    pub(super) async fn number(&mut self, sql: &str) -> i64 {
        let whole = format!("SELECT ({sql})::bigint");
        sqlx::query_scalar(AssertSqlSafe(whole)).fetch_one(&mut self.conn).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The rows of a view as text, some of them, for a message.
    pub(super) async fn rows(&mut self, view: &str) -> Vec<String> {
        let sql = format!("SELECT v::text FROM {view} v LIMIT 20");
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut self.conn).await.expect("a view");
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// What no fault may bring about.
    pub(super) async fn assert_promises(&mut self) {
        for (view, what) in PROMISES {
            let rows = self.rows(view).await;
            assert!(rows.is_empty(), "{what}:\n{}", rows.join("\n"));
        }
    }

    /// The rate of ends before an instant (their average in the ten seconds before, or as many as there were), and how long
    /// after it they were first as many as 95 % of that for two seconds on end. Nothing if that did not happen within a minute, or before the load ended.
    pub(super) async fn recovery(&mut self, fault: u64) -> (f64, Option<f64>) {
        let sql = "WITH before AS (SELECT count(*) * 1e9 / nullif($1 - greatest(min(ended), $1 - 10000000000), 0) AS rate
                                     FROM attempt WHERE ended < $1 AND ended >= $1 - 10000000000),
                        slice AS (SELECT s, (SELECT count(*) FROM attempt WHERE ended >= $1 + s * 500000000 AND ended < $1 + s * 500000000 + 2000000000) / 2.0 AS rate
                                    FROM generate_series(0::bigint, 120) s)
                   SELECT coalesce(b.rate, 0)::float8, (SELECT min(n.s) * 0.5 FROM slice n WHERE n.rate >= 0.95 * b.rate)::float8 FROM before b";
        let row = sqlx::query(sql).bind(nanos(fault)).fetch_one(&mut self.conn).await.expect("a rate");
        (row.get(0), row.get(1))
    }
}

fn nanos(at: u64) -> i64 {
    i64::try_from(at).expect("before the year 2262")
}

/// Each question finds what it asks for, and nothing where all is well.
#[test]
fn every_kind_of_wrong_is_found_in_the_ledger() {
    const GOOD: &str = "
        TRUNCATE attempt, job, gone, rule, held, cut, noticed, lag;
        INSERT INTO rule VALUES (1, 'm', 1, 0, 0), (2, 's', 3, 0, 0), (3, 'l', 2, 0, 0), (4, 'l', 1, 90, 110);
        INSERT INTO held VALUES (4, 'j4'), (4, 'j5');
        INSERT INTO attempt VALUES
            ('j1', 1, 1, 'm', 'a', 100, 150, NULL), ('j1', 2, 2, 'm', 'b', 200, 250, 300), ('j2', 1, 3, 'm', 'b', 300, 350, 400),
            ('j4', 1, 4, 'l', 'a', 80, 100, 200), ('j5', 1, 5, 'l', 'a', 120, 130, 180), ('j6', 1, 6, 'l', 'c', 200, 210, 220);
        INSERT INTO job VALUES ('j1', 'm', 'Completed', 1, 2), ('j2', 'm', 'Completed', 1, 1), ('j4', 'l', 'Completed', 1, 1),
            ('j5', 'l', 'Completed', 1, 1), ('j6', 'l', 'Completed', 1, 1);";
    // The first run of j1 goes on while the second runs.
    const ON: &str = "UPDATE attempt SET alive = 201 WHERE job = 'j1' AND run = 1";
    // A lock session of some host was ended.
    const CUT: &str = "INSERT INTO cut VALUES (7, 120, true)";
    let wrongs: [(&[&str], &[&str]); _] = [
        (&[], &[]),
        (&["beside"], &["UPDATE attempt SET ended = 301 WHERE job = 'j1' AND run = 2"]),
        (&["beside"], &[ON]),
        // Its host was killed later, which says nothing about how long it went on.
        (&[], &["INSERT INTO gone VALUES ('a', 260)"]),
        (&["beside"], &["INSERT INTO gone VALUES ('a', 201)", "UPDATE attempt SET alive = 205 WHERE job = 'j1' AND run = 1"]),
        // A frozen host's attempt may have gone on for a moment when it woke: that is the one exception.
        (&[], &["INSERT INTO gone VALUES ('a', 140)", "UPDATE attempt SET ended = 205 WHERE job = 'j1' AND run = 1"]),
        (&["beside"], &["UPDATE attempt SET started = 199 WHERE job = 'j6'"]),
        (&["beside"], &["DELETE FROM held WHERE job = 'j5'"]),
        (&["beside"], &["INSERT INTO lag VALUES (10)", "UPDATE attempt SET started = 121 WHERE job = 'j6'", "DELETE FROM held"]),
        (&[], &["INSERT INTO lag VALUES (20)", "DELETE FROM held"]),
        (&["lost"], &["UPDATE job SET state = 'Enqueued' WHERE job = 'j2'"]),
        (&["lost"], &["UPDATE job SET attempts = 2 WHERE job = 'j2'"]),
        (&["lost"], &["UPDATE attempt SET ended = NULL WHERE job = 'j6'"]),
        // Whose end was taken without one of its own is both.
        (&["late", "lost"], &["UPDATE job SET accepted = 1 WHERE job = 'j1'"]),
        (&["misordered"], &["UPDATE attempt SET token = 9 WHERE job = 'j1' AND run = 2"]),
        // Under session locks: excused from the cut until its own host knows and has stopped it.
        (&[], &[ON, CUT, "INSERT INTO noticed VALUES ('a', 7, 190)"]),
        (&["beside"], &[ON, CUT, "INSERT INTO noticed VALUES ('c', 7, 190)"]),
        (&["beside"], &[ON, "INSERT INTO cut VALUES (7, 202, true)", "INSERT INTO noticed VALUES ('a', 7, 203)"]),
        (&["beside", "unnoticed"], &[ON, CUT]),
        (&["beside"], &[ON, "INSERT INTO cut VALUES (7, 120, false)"]),
        (&["unnoticed"], &[CUT, "INSERT INTO noticed VALUES ('a', 7, 3000000121)"]),
        (&["overtime"], &[CUT, "INSERT INTO noticed VALUES ('c', 7, 190)", "UPDATE attempt SET ended = 1000000191 WHERE job = 'j6'"]),
        (&[], &[CUT, "INSERT INTO noticed VALUES ('c', 7, 190)", "UPDATE attempt SET ended = 1000000190 WHERE job = 'j6'"]),
        (
            &["early"],
            &[
                CUT,
                "INSERT INTO noticed VALUES ('c', 7, 190)",
                "UPDATE attempt SET started = 4000000189, ended = 4000000199 WHERE job = 'j6'",
            ],
        ),
        (
            &[],
            &[
                CUT,
                "INSERT INTO noticed VALUES ('c', 7, 190)",
                "UPDATE attempt SET started = 4000000190, ended = 4000000199 WHERE job = 'j6'",
            ],
        ),
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut witness = Witness::new(warp_test_servers::database()).await;
        for (found, wrong) in wrongs {
            witness.execute(GOOD).await;
            for change in wrong {
                witness.execute(change).await;
            }
            for (view, _) in PROMISES {
                assert_eq!(!witness.rows(view).await.is_empty(), found.contains(&view), "{view} after {wrong:?}");
            }
        }
    });
}
