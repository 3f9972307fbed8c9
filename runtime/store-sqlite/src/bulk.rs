//! One statement for many rows, in a few fixed shapes so that the prepared statement is found again.
//!
//! A batch is cut into pieces of a shape's size and the last piece is filled up with rows of NULL, which every
//! statement built here ignores. So a statement exists in [`SHAPES`] forms however large a batch is.

use std::sync::Arc;

use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments as _, AssertSqlSafe, SqliteConnection};

use crate::error::Fault;

/// Rows of one statement. The largest keeps the widest row far below SQLite's limit of 32,766 parameters.
const SHAPES: [usize; 4] = [1, 8, 64, 256];

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

    /// Runs it over all `rows`; how many were changed.
    pub(crate) async fn run<T>(
        &self,
        conn: &mut SqliteConnection,
        rows: &[T],
        mut put: impl FnMut(&T, &mut Row<'_>) -> Result<(), Fault>,
    ) -> Result<u64, Fault> {
        let mut rest = rows;
        let mut changed = 0;
        while !rest.is_empty() {
            let (shape, size) = shape_for(rest.len());
            let (piece, later) = rest.split_at(size.min(rest.len()));
            rest = later;
            let mut arguments = SqliteArguments::default();
            arguments.reserve(size * self.arity, 0);
            for row in piece {
                put(row, &mut Row(&mut arguments))?;
            }
            for _ in 0..(size - piece.len()) * self.arity {
                Row(&mut arguments).put(None::<i64>)?;
            }
            debug_assert_eq!(arguments.len(), size * self.arity, "every row fills every column");
            changed += sqlx::query_with(AssertSqlSafe(self.texts[shape].clone()), arguments).execute(&mut *conn).await?.rows_affected();
        }
        Ok(changed)
    }
}

/// The shape for the next piece of so many rows: the largest that is filled at least to a half.
fn shape_for(rows: usize) -> (usize, usize) {
    let mut chosen = (0, SHAPES[0]);
    for (at, size) in SHAPES.into_iter().enumerate() {
        if rows >= size.div_ceil(2) {
            chosen = (at, size);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_never_less_than_half_full_unless_it_is_the_smallest() {
        for (rows, expected) in [(1, 1), (2, 1), (3, 1), (4, 8), (8, 8), (31, 8), (32, 64), (127, 64), (128, 256), (100_000, 256)] {
            assert_eq!(shape_for(rows).1, expected, "{rows} rows");
        }
    }
}
