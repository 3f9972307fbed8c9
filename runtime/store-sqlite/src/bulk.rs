//! Many rows in few statements, and many statements in one round trip.
//!
//! A batch is cut into pieces of a few fixed shapes so that the prepared statement is found again; the last piece is
//! filled up with rows of NULL, which every statement built here ignores. So a statement exists in [`SHAPES`] forms
//! however large a batch is.
//!
//! A statement costs a hand-over to the driver's thread and back, which is more than SQLite's own work on a short
//! one. A [`Script`] hands over several at once. It stops at the first that fails, and what came before it has been
//! done: undoing is the caller's affair.

use std::sync::Arc;

use futures_util::TryStreamExt as _;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments as _, AssertSqlSafe, Either, Executor as _, SqliteConnection};

use crate::error::Fault;

/// Rows of one statement. The largest keeps the widest row far below SQLite's limit of 32,766 parameters. Each is
/// twice the one before, so that up to the largest one piece holds all rows and is half full at least: a script of
/// several tables then has few forms.
const SHAPES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// A statement over `(VALUES …)`.
pub(crate) struct Bulk {
    arity: usize,
    texts: [Arc<str>; SHAPES.len()],
}

/// The values of one row, in order.
pub(crate) struct Row<'a>(&'a mut SqliteArguments);

impl Row<'_> {
    /// Adds the next value.
    pub(crate) fn put<'v, T>(&mut self, value: T) -> Result<&mut Self, Fault>
    where
        T: sqlx::Encode<'v, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        self.0.add(value).map_err(|error| Fault::Sql(sqlx::Error::Encode(error)))?;
        Ok(self)
    }
}

impl Bulk {
    /// `before (VALUES …) WHERE column1 IS NOT NULL after`, with so many columns. The first is never NULL.
    pub(crate) fn new(before: &str, arity: usize, after: &str) -> Self {
        Bulk::selecting("*", before, arity, after)
    }

    /// The same with columns of its own choice over `column1`, `column2` and so on.
    pub(crate) fn selecting(columns: &str, before: &str, arity: usize, after: &str) -> Self {
        let row = format!("({})", vec!["?"; arity].join(","));
        let texts = SHAPES.map(|rows| {
            let values = vec![row.as_str(); rows].join(",");
            format!("{before} SELECT {columns} FROM (VALUES {values}) WHERE column1 IS NOT NULL {after}").into()
        });
        Bulk { arity, texts }
    }

    /// Runs it over all `rows`.
    pub(crate) async fn run<T>(
        &self,
        conn: &mut SqliteConnection,
        rows: &[T],
        put: impl FnMut(&T, &mut Row<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut script = Script::default();
        script.rows(self, rows, put)?;
        script.run(conn).await.map(drop)
    }
}

/// Statements that are handed over together.
#[derive(Default)]
pub(crate) struct Script {
    text: String,
    arguments: SqliteArguments,
    statements: usize,
}

impl Script {
    /// Adds a statement without values.
    pub(crate) fn say(&mut self, statement: &str) {
        self.text.push_str(statement);
        self.text.push(';');
        self.statements += 1;
    }

    /// Adds the value of the next `?`.
    pub(crate) fn put(&mut self, value: i64) -> Result<(), Fault> {
        Row(&mut self.arguments).put(value).map(drop)
    }

    /// Adds `bulk` over all `rows`; which statements these are.
    pub(crate) fn rows<T>(
        &mut self,
        bulk: &Bulk,
        rows: &[T],
        mut put: impl FnMut(&T, &mut Row<'_>) -> Result<(), Fault>,
    ) -> Result<std::ops::Range<usize>, Fault> {
        let first = self.statements;
        let mut rest = rows;
        while !rest.is_empty() {
            let (shape, size) = shape_for(rest.len());
            let (piece, later) = rest.split_at(size.min(rest.len()));
            rest = later;
            let before = self.arguments.len();
            self.arguments.reserve(size * bulk.arity, 0);
            for row in piece {
                put(row, &mut Row(&mut self.arguments))?;
            }
            for _ in 0..(size - piece.len()) * bulk.arity {
                Row(&mut self.arguments).put(None::<i64>)?;
            }
            debug_assert_eq!(self.arguments.len() - before, size * bulk.arity, "every row fills every column");
            self.say(&bulk.texts[shape]);
        }
        Ok(first..self.statements)
    }

    /// Runs it; how many rows each statement has changed (of one that changes none by nature it says nothing).
    pub(crate) async fn run(self, conn: &mut SqliteConnection) -> Result<Vec<u64>, Fault> {
        let mut changed = Vec::with_capacity(self.statements);
        if self.statements == 0 {
            return Ok(changed);
        }
        let mut results = conn.fetch_many(sqlx::query_with(AssertSqlSafe(self.text), self.arguments));
        while let Some(result) = results.try_next().await? {
            if let Either::Left(done) = result {
                changed.push(done.rows_affected());
            }
        }
        Ok(changed)
    }
}

/// The shape for the next piece of so many rows: the smallest that holds all of them, or the largest.
fn shape_for(rows: usize) -> (usize, usize) {
    let at = SHAPES.iter().position(|size| *size >= rows).unwrap_or(SHAPES.len() - 1);
    (at, SHAPES[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_at_least_half_full() {
        for (rows, expected) in [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (33, 64), (127, 128), (129, 256), (100_000, 256)] {
            assert_eq!(shape_for(rows).1, expected, "{rows} rows");
        }
    }
}
