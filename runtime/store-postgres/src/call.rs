//! One statement: its text, its arguments, and running it.
//!
//! What must stay true:
//! - a statement that has been handed over runs to its end on a task of its own, whoever still listens (slots.md C2);
//! - a statement is one message that commits by itself, so nothing is left on the connection;
//! - an argument reaches the server as the same value in both ways of sending it.
//!
//! Two ways of sending: *prepared* (binary parameters, the statement is parsed once for a session) and *simple* (one
//! message with literals, which any pooler passes on). Rows come back in binary or in text; the driver's types read
//! both, except arrays of text, for which there is [`Texts`].
//!
//! What it deliberately does not do: transactions of several statements.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgConnection, PgRow, PgTypeInfo, PgValueFormat, PgValueRef};
use sqlx::{Arguments as _, AssertSqlSafe, Decode, Postgres, Row as _, SqlSafeStr as _, SqlStr, Type};
use tokio::runtime::Handle;
use uuid::Uuid;
use warp_store::StoreErrorKind;

use crate::connect::{Connector, Pool, PoolState};
use crate::error::{Fault, Phase};
use crate::pooler::{self, Pooling};
use crate::settings::{ConnectSettings, StatementMode};

/// How often a statement is tried that the server rolled back because of others.
const TRIES: u32 = 6;
/// The longest pause before the second try; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(8);
/// An urgent statement that gets no answer for so long is sent elsewhere: a lease must not lapse behind one connection
/// that has gone silent.
const URGENT_PATIENCE: Duration = Duration::from_secs(5);
/// What the server is told to end by itself is given so much longer here, so that its own answer is heard.
const GRACE: Duration = Duration::from_secs(2);

/// A statement with its arguments.
#[derive(Debug)]
pub struct Sql {
    text: &'static str,
    args: Vec<Arg>,
    urgent: bool,
    repeatable: bool,
}

impl Sql {
    /// A statement. `$1` … stand for the arguments, and nothing else in it may look like them; `warp` is the schema
    /// (see [`place`]).
    pub fn new(text: &'static str) -> Self {
        Sql { text, args: Vec::new(), urgent: false, repeatable: false }
    }

    /// The next argument.
    #[must_use]
    pub fn arg(mut self, value: impl Into<Arg>) -> Self {
        self.args.push(value.into());
        self
    }

    /// May use one connection beyond the pool's size, so that it never waits behind work, and gets an answer or an error
    /// within seconds: renewing a lease.
    #[must_use]
    pub fn urgent(mut self) -> Self {
        self.urgent = true;
        self
    }

    /// Does no harm when it runs twice, so it is sent again when the first answer was lost: questions.
    #[must_use]
    pub fn repeatable(mut self) -> Self {
        self.repeatable = true;
        self
    }
}

/// The kinds of arguments: variant for one, variant for an array, Rust type, PostgreSQL type.
macro_rules! kinds {
    ($($one:ident $many:ident $rust:ty, $sql:literal;)*) => {
        /// An argument of a statement. Made with `into()`.
        #[derive(Debug, Clone)]
        pub enum Arg {
            $(
                #[doc = concat!("One ", $sql, ".")]
                $one(Option<$rust>),
                #[doc = concat!("An array of ", $sql, ".")]
                $many(Vec<Option<$rust>>),
            )*
        }

        $(
            impl From<$rust> for Arg {
                fn from(value: $rust) -> Self {
                    Arg::$one(Some(value))
                }
            }
            impl From<Option<$rust>> for Arg {
                fn from(value: Option<$rust>) -> Self {
                    Arg::$one(value)
                }
            }
            impl From<Vec<$rust>> for Arg {
                fn from(values: Vec<$rust>) -> Self {
                    Arg::$many(values.into_iter().map(Some).collect())
                }
            }
            impl From<Vec<Option<$rust>>> for Arg {
                fn from(values: Vec<Option<$rust>>) -> Self {
                    Arg::$many(values)
                }
            }
        )*

        impl Arg {
            fn bind(&self, to: &mut PgArguments) -> Result<(), BoxDynError> {
                match self {
                    $(
                        Arg::$one(value) => to.add(value.as_ref().map(Plain::plain)),
                        Arg::$many(values) => to.add(values.iter().map(|value| value.as_ref().map(Plain::plain)).collect::<Vec<_>>()),
                    )*
                }
            }

            /// Appends the literal, with its type.
            fn write(&self, out: &mut String) {
                match self {
                    $(
                        Arg::$one(None) => out.push_str(concat!("NULL::", $sql)),
                        Arg::$one(Some(value)) => {
                            let mut text = String::new();
                            value.write(&mut text);
                            quote(&text, out);
                            out.push_str(concat!("::", $sql));
                        }
                        Arg::$many(values) => {
                            quote(&array(values), out);
                            out.push_str(concat!("::", $sql, "[]"));
                        }
                    )*
                }
            }

            /// A NUL character has no place in PostgreSQL's text, and would end a simple statement early.
            fn has_nul(&self) -> bool {
                match self {
                    $(
                        Arg::$one(value) => value.as_ref().is_some_and(Plain::has_nul),
                        Arg::$many(values) => values.iter().flatten().any(Plain::has_nul),
                    )*
                }
            }
        }
    };
}

kinds! {
    Bool Bools bool, "bool";
    I16 I16s i16, "int2";
    I32 I32s i32, "int4";
    I64 I64s i64, "int8";
    F32 F32s f32, "float4";
    Text Texts String, "text";
    Bytes ManyBytes Vec<u8>, "bytea";
    Uuid Uuids u128, "uuid";
}

impl From<&str> for Arg {
    fn from(value: &str) -> Self {
        Arg::Text(Some(value.to_owned()))
    }
}

/// What a kind of argument is to the driver, and as text.
trait Plain {
    type As<'a>
    where
        Self: 'a;
    /// The value that the driver encodes.
    fn plain(&self) -> Self::As<'_>;
    /// Appends the text that PostgreSQL's type reads.
    fn write(&self, out: &mut String);
    fn has_nul(&self) -> bool {
        false
    }
}

macro_rules! numbers {
    ($($rust:ty)*) => {
        $(impl Plain for $rust {
            type As<'a> = $rust;
            fn plain(&self) -> $rust {
                *self
            }
            fn write(&self, out: &mut String) {
                // The shortest text that reads back as the same number; "NaN" and "inf" are known to PostgreSQL too.
                let _ = write!(out, "{self}");
            }
        })*
    };
}
numbers!(bool i16 i32 i64 f32);

impl Plain for String {
    type As<'a> = &'a str;
    fn plain(&self) -> &str {
        self
    }
    fn write(&self, out: &mut String) {
        out.push_str(self);
    }
    fn has_nul(&self) -> bool {
        self.contains('\0')
    }
}

impl Plain for Vec<u8> {
    type As<'a> = &'a [u8];
    fn plain(&self) -> &[u8] {
        self
    }
    fn write(&self, out: &mut String) {
        out.push_str("\\x");
        for byte in self {
            let _ = write!(out, "{byte:02x}");
        }
    }
}

impl Plain for u128 {
    type As<'a> = Uuid;
    fn plain(&self) -> Uuid {
        Uuid::from_u128(*self)
    }
    fn write(&self, out: &mut String) {
        let _ = write!(out, "{}", Uuid::from_u128(*self));
    }
}

/// Appends a string literal. With a backslash in it, it is written as `E'…'`, which means the same whatever
/// `standard_conforming_strings` says.
fn quote(text: &str, out: &mut String) {
    let escaped = text.contains('\\');
    out.reserve(text.len() + 3);
    out.push_str(if escaped { " E'" } else { "'" });
    for c in text.chars() {
        if c == '\'' || c == '\\' {
            out.push(c);
        }
        out.push(c);
    }
    out.push('\'');
}

/// The text of an array; every element that is not NULL is quoted.
fn array<T: Plain>(values: &[Option<T>]) -> String {
    let mut out = String::from("{");
    let mut text = String::new();
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        let Some(value) = value else {
            out.push_str("NULL");
            continue;
        };
        text.clear();
        value.write(&mut text);
        out.push('"');
        for c in text.chars() {
            if c == '"' || c == '\\' {
                out.push('\\');
            }
            out.push(c);
        }
        out.push('"');
    }
    out.push('}');
    out
}

/// The text with every `$n` replaced by its literal.
fn with_literals(text: &str, args: &[Arg]) -> Result<String, Fault> {
    let mut out = String::with_capacity(text.len() + 64 * args.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if digits == 0 {
            out.push('$');
        } else {
            let arg = after[..digits].parse::<usize>().ok().and_then(|number| args.get(number.checked_sub(1)?));
            let missing = || {
                Fault::said(StoreErrorKind::Internal, format!("a statement names ${} and has {} arguments", &after[..digits], args.len()))
            };
            arg.ok_or_else(missing)?.write(&mut out);
        }
        rest = &after[digits..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The text for another schema than `warp`. In static SQL the word `warp` alone is the schema, and the channel of the
/// same name; `warp_x`, `warp:x` and `warp-x` are not touched.
pub(crate) fn place(text: &str, schema: &str) -> String {
    const WORD: &str = "warp";
    let part_of_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$' | ':' | '-');
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    let mut rest = text;
    let mut previous = ' ';
    while let Some((before, after)) = rest.split_once(WORD) {
        out.push_str(before);
        previous = before.chars().next_back().unwrap_or(previous);
        // A cast is no word that goes on: `x::warp.state_row`.
        let begins = before.ends_with("::") || !part_of_word(previous);
        let alone = begins && !after.chars().next().is_some_and(part_of_word);
        out.push_str(if alone { schema } else { WORD });
        previous = 'p';
        rest = after;
    }
    out.push_str(rest);
    out
}

/// An array of text from a row, in both formats. (The driver's own reading of the text format takes the string `NULL`
/// for no value.)
pub struct Texts(pub Vec<Option<String>>);

impl Type<Postgres> for Texts {
    fn type_info() -> PgTypeInfo {
        <Vec<String> as Type<Postgres>>::type_info()
    }
    fn compatible(ty: &PgTypeInfo) -> bool {
        <Vec<String> as Type<Postgres>>::compatible(ty)
    }
}

impl<'r> Decode<'r, Postgres> for Texts {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Ok(Texts(Vec::decode(value)?)),
            PgValueFormat::Text => Ok(Texts(read_array(value.as_str()?).ok_or("an array that cannot be read")?)),
        }
    }
}

/// Reads `{a,"b\"c",NULL}`.
fn read_array(text: &str) -> Option<Vec<Option<String>>> {
    let mut chars = text.strip_prefix('{')?.strip_suffix('}')?.chars().peekable();
    let mut values = Vec::new();
    if chars.peek().is_none() {
        return Some(values);
    }
    loop {
        let quoted = chars.next_if_eq(&'"').is_some();
        let mut value = String::new();
        let more = loop {
            match chars.next() {
                Some('\\') => value.push(chars.next()?),
                Some('"') if quoted => break chars.next(),
                None if quoted => return None,
                end @ (Some(',') | None) if !quoted => break end,
                Some(c) => value.push(c),
                None => return None,
            }
        };
        values.push((quoted || value != "NULL").then_some(value));
        match more {
            Some(',') => {}
            Some(_) => return None,
            None => return Some(values),
        }
    }
}

/// A column of a row. An error here is a fault of this build, not of the caller.
pub fn get<'r, T>(row: &'r PgRow, at: usize) -> Result<T, Fault>
where
    T: Decode<'r, Postgres> + Type<Postgres>,
{
    row.try_get(at).map_err(|error| Fault::said(StoreErrorKind::Internal, format!("a row of the database cannot be read: {error}")))
}

/// An id in a column of type uuid.
pub fn get_id(row: &PgRow, at: usize) -> Result<u128, Fault> {
    get::<Uuid>(row, at).map(|id| id.as_u128())
}

/// How statements go out, once it has been found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    Prepared,
    Simple,
}

/// The database. Cheap to clone.
#[derive(Clone)]
pub struct Db(Arc<Shared>);

struct Shared {
    pool: Arc<Pool>,
    sending: Sending,
    pooling: Option<Pooling>,
    schema: String,
    /// Texts for another schema, by the static text they come from.
    placed: RwLock<HashMap<&'static str, Arc<str>>>,
    patience: Duration,
    /// Connections belong to the runtime that they were made on.
    runtime: Handle,
}

impl Db {
    /// Connects, and finds out how statements can be sent. Statements run on the runtime that calls this. Dropped, it
    /// leaves nothing behind.
    pub async fn open(settings: &ConnectSettings) -> Result<Self, Fault> {
        let runtime = Handle::current();
        let connector = Connector::new(settings)?;
        let (sending, pooling, mut first) = match settings.mode {
            StatementMode::Prepared => (Sending::Prepared, None, Vec::new()),
            StatementMode::Simple => (Sending::Simple, None, Vec::new()),
            StatementMode::Auto => {
                let probed = pooler::probe(&connector, "").await?;
                probed.refuse_starved(&connector, settings.pool)?;
                let sending = if probed.pooling == Pooling::Session { Sending::Prepared } else { Sending::Simple };
                (sending, Some(probed.pooling), probed.connections)
            }
        };
        let setup = (sending == Sending::Prepared).then(|| session_setup(settings.statement_timeout));
        for conn in &mut first {
            if let Some(setup) = &setup {
                connector.set_up(conn, setup).await?;
            }
        }
        let pool = Pool::new(connector, (settings.pool, settings.idle_timeout), setup, first, &runtime);
        Ok(Db(Arc::new(Shared {
            pool,
            sending,
            pooling,
            schema: settings.schema.clone(),
            placed: RwLock::default(),
            patience: settings.statement_timeout + if sending == Sending::Prepared { GRACE } else { Duration::ZERO },
            runtime,
        })))
    }

    /// The address for people, without a password.
    pub fn name(&self) -> &str {
        self.0.pool.name()
    }

    /// How many connections the pool has open.
    pub fn pool_state(&self) -> PoolState {
        self.0.pool.state()
    }

    /// The schema of the tables.
    pub fn schema(&self) -> &str {
        &self.0.schema
    }

    /// What the two-client test found when the database was opened; nothing when the settings left no question.
    pub fn pooling(&self) -> Option<Pooling> {
        self.0.pooling
    }

    /// Runs a statement and returns its rows. Dropped, the statement still runs to its end.
    pub async fn rows(&self, sql: Sql) -> Result<Vec<PgRow>, Fault> {
        let db = self.clone();
        // Dropping the handle detaches the task.
        match self.0.runtime.spawn(async move { db.run(sql).await }).await {
            Ok(answer) => answer,
            Err(error) if error.is_panic() => Err(Fault::said(StoreErrorKind::Internal, "a statement's task panicked")),
            Err(_) => Err(Fault::said(StoreErrorKind::OutcomeUnknown, "the process is ending; whether the statement ran is unknown")),
        }
    }

    /// Runs a statement that returns one row.
    pub async fn row(&self, sql: Sql) -> Result<PgRow, Fault> {
        let missing = || Fault::said(StoreErrorKind::Internal, "a statement returned no row where one was expected");
        self.optional(sql).await?.ok_or_else(missing)
    }

    /// Runs a statement that returns at most one row.
    pub async fn optional(&self, sql: Sql) -> Result<Option<PgRow>, Fault> {
        Ok(self.rows(sql).await?.into_iter().next())
    }

    async fn run(&self, sql: Sql) -> Result<Vec<PgRow>, Fault> {
        if sql.args.iter().any(Arg::has_nul) {
            return Err(Fault::said(StoreErrorKind::Invalid, "a text contains a NUL character, which PostgreSQL cannot store"));
        }
        let mut tries = 1;
        loop {
            let fault = match self.try_once(&sql).await {
                Ok(rows) => return Ok(rows),
                Err(fault) => fault,
            };
            let harmless = fault.may_pass_again() || (sql.repeatable && fault.kind() == StoreErrorKind::OutcomeUnknown);
            if !harmless || tries >= TRIES {
                return Err(fault);
            }
            tracing::debug!(tries, why = fault.text(), "a statement is sent again");
            tokio::time::sleep(pause(tries)).await;
            tries += 1;
        }
    }

    async fn try_once(&self, sql: &Sql) -> Result<Vec<PgRow>, Fault> {
        let pool = &self.0.pool;
        let mut lease = pool.lease(sql.urgent).await?;
        let patience = if sql.urgent { self.0.patience.min(URGENT_PATIENCE) } else { self.0.patience };
        let answer = tokio::time::timeout(patience, self.send(&mut lease.conn, sql)).await;
        let fault = match answer {
            Ok(Ok(rows)) => {
                pool.give_back(lease);
                return Ok(rows);
            }
            Ok(Err(fault)) => fault,
            // The connection is closed with the lease; the server notices when it next writes to it.
            Err(_) => {
                let text = format!("{} gave no answer to a statement in {patience:?}; whether it took effect is unknown", self.name());
                return Err(Fault::said(StoreErrorKind::OutcomeUnknown, text));
            }
        };
        if !fault.ends_connection() {
            pool.give_back(lease);
        } else {
            pool.forget_idle();
        }
        Err(fault)
    }

    async fn send(&self, conn: &mut PgConnection, sql: &Sql) -> Result<Vec<PgRow>, Fault> {
        let text = self.text(sql.text);
        let answer = match self.0.sending {
            Sending::Prepared => {
                let mut arguments = PgArguments::default();
                for arg in &sql.args {
                    arg.bind(&mut arguments).map_err(|error| Fault::said(StoreErrorKind::Invalid, error.to_string()))?;
                }
                sqlx::query_with(text, arguments).fetch_all(conn).await
            }
            Sending::Simple => return send_simple(conn, text.as_str(), &sql.args, self.name()).await,
        };
        answer.map_err(|error| Fault::from_driver(&error, Phase::Sent, self.name()))
    }

    /// The text for this database's schema.
    fn text(&self, text: &'static str) -> SqlStr {
        if self.0.schema == "warp" {
            return text.into_sql_str();
        }
        let known = self.0.placed.read().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
        let placed = known.unwrap_or_else(|| {
            let placed: Arc<str> = place(text, &self.0.schema).into();
            self.0.placed.write().unwrap_or_else(PoisonError::into_inner).insert(text, placed.clone());
            placed
        });
        AssertSqlSafe(placed).into_sql_str()
    }
}

/// Runs a statement as a simple query on a connection that is not of the pool. Dropped, the connection must be dropped
/// too.
pub(crate) async fn simple(conn: &mut PgConnection, sql: &Sql, schema: &str, target: &str) -> Result<Vec<PgRow>, Fault> {
    send_simple(conn, &place(sql.text, schema), &sql.args, target).await
}

async fn send_simple(conn: &mut PgConnection, text: &str, args: &[Arg], target: &str) -> Result<Vec<PgRow>, Fault> {
    let text = with_literals(text, args)?;
    sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(conn).await.map_err(|error| Fault::from_driver(&error, Phase::Sent, target))
}

/// What a session is told once. The server ends a statement that takes too long, so that its locks do not outlive the
/// patience here; a host that has vanished is noticed in half a minute; compiling the plan of a small statement is a loss.
fn session_setup(statement_timeout: Duration) -> String {
    let millis = statement_timeout.as_millis().min(i32::MAX as u128);
    format!(
        "SET statement_timeout = {millis}; SET jit = off; SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 4"
    )
}

/// The pause after a number of tries, jittered so that those who collided do not meet again.
fn pause(tries: u32) -> Duration {
    let longest = FIRST_PAUSE * 2u32.saturating_pow(tries - 1);
    // The standard library seeds every hasher anew, which is chance enough.
    let permille = u32::try_from(RandomState::new().hash_one(tries) % 1000).unwrap_or(0);
    longest / 4 + longest * 3 / 4 * permille / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literal(arg: impl Into<Arg>) -> String {
        with_literals("$1", &[arg.into()]).expect("an argument")
    }

    #[test]
    fn literals_cannot_be_left() {
        for (literal, expected) in [
            (literal(true), "'true'::bool"),
            (literal(-5i64), "'-5'::int8"),
            (literal(None::<i32>), "NULL::int4"),
            (literal("it's"), "'it''s'::text"),
            (literal(r"a\'b"), r" E'a\\''b'::text"),
            (literal(vec![1u8, 255]), r" E'\\x01ff'::bytea"),
            (literal(1u128), "'00000000-0000-0000-0000-000000000001'::uuid"),
            (literal(vec![Some(1i64), None]), r#"'{"1",NULL}'::int8[]"#),
            (literal(Vec::<i64>::new()), "'{}'::int8[]"),
            (literal(vec![r#"a"b'c"#.to_owned(), "NULL".to_owned()]), r#" E'{"a\\"b''c","NULL"}'::text[]"#),
        ] {
            assert_eq!(literal, expected);
        }
    }

    #[test]
    fn every_placeholder_is_replaced_by_its_own_argument() {
        let args: Vec<Arg> = (1..=11i64).map(Arg::from).collect();
        assert_eq!(with_literals("f($1,$11,$2) -- $", &args).expect("all there"), "f('1'::int8,'11'::int8,'2'::int8) -- $");
        assert!(with_literals("$12", &args).is_err(), "an argument is missing");
        assert!(with_literals("$0", &args).is_err(), "they are counted from 1");
    }

    #[test]
    fn the_schema_is_replaced_and_nothing_that_looks_like_it() {
        let text =
            "SELECT warp.f(x), 'warp:slot', 'warp_x' FROM warp.job; NOTIFY 'warp'; SET search_path = warp, pg_temp; -- run `warp-host`";
        let placed =
            "SELECT jobs.f(x), 'warp:slot', 'warp_x' FROM jobs.job; NOTIFY 'jobs'; SET search_path = jobs, pg_temp; -- run `warp-host`";
        assert_eq!(place(text, "jobs"), placed);
        assert_eq!(place("my_warp.x warp", "jobs"), "my_warp.x jobs");
        assert_eq!(place("g::warp.state_row[]", "jobs"), "g::jobs.state_row[]");
    }

    #[test]
    fn arrays_of_text_are_read_as_postgresql_writes_them() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read_array("{}"), Some(vec![]));
        assert_eq!(read_array(r#"{a,"b,\"c\\",NULL,"NULL",""}"#), Some(vec![some("a"), some(r#"b,"c\"#), None, some("NULL"), some("")]));
        for broken in ["", "{", "a", r#"{"a}"#, r#"{"a"b}"#, r"{\"] {
            assert_eq!(read_array(broken), None, "{broken}");
        }
    }

    #[test]
    fn pauses_grow_and_stay_bounded() {
        for tries in 1..TRIES {
            let longest = FIRST_PAUSE * 2u32.pow(tries - 1);
            assert!((longest / 4..=longest).contains(&pause(tries)), "after {tries} tries");
        }
    }
}
