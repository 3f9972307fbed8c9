//! Questions about the server itself, for `bench` and `doctor`: settings, statistics, other clients' connections.
//!
//! What must stay true: an observer has a connection of its own, so what it asks is never in the way of work and can
//! be told from it. It asks with simple queries and takes every answer as text, so it works through any pooler.
//!
//! What it deliberately does not do: know what is worth asking. Its callers write the questions.

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Row as _, ValueRef as _};
use warp_store::Result;

use crate::connect::{Connector, close};
use crate::error::{Fault, Phase};
use crate::settings::ConnectSettings;

/// What is appended to the name of the application.
const SUFFIX: &str = ":observer";

/// A connection for questions.
pub struct Observer {
    conn: PgConnection,
    name: String,
}

impl Observer {
    /// Connects. Dropped, it leaves nothing behind.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn connect(settings: &ConnectSettings) -> Result<Self> {
        let connecting = async {
            let connector = Connector::new(settings)?;
            let conn = connector.connect(SUFFIX).await?;
            Ok(Observer { conn, name: connector.name().to_owned() })
        };
        connecting.await.map_err(|fault: Fault| fault.into_error("ask the server"))
    }

    /// Asks one or more statements; every column of every row as text. The caller vouches for the text: it is sent as it
    /// stands. A call that is dropped leaves a statement that runs to its end, and an observer of no more use.
    ///
    /// # Errors
    /// What the server says.
    pub async fn ask(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        let answer = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut self.conn).await;
        let texts = answer.and_then(|rows| rows.iter().map(texts).collect::<std::result::Result<_, _>>());
        texts.map_err(|error| Fault::from_driver(&error, Phase::Sent, &self.name).into_error("ask the server"))
    }

    /// Ends the connection in good form.
    pub async fn close(self) {
        close(self.conn).await;
    }
}

fn texts(row: &PgRow) -> std::result::Result<Vec<Option<String>>, sqlx::Error> {
    let text = |at: usize| {
        let value = row.try_get_raw(at)?;
        if value.is_null() {
            return Ok(None);
        }
        value.as_str().map(|text| Some(text.to_owned())).map_err(sqlx::Error::Decode)
    };
    (0..row.len()).map(text).collect()
}
