//! Opening, creating and copying the database.
//!
//! What must stay true: a command that only looks never creates a database, because a mistyped name would then
//! look like an empty one. `run` and `migrate` create it.

use std::path::PathBuf;

use warp_store_sqlite::{OpenOptions, SqliteStore};

use crate::args::{BackupArgs, MigrateArgs};
use crate::config::{Config, without_password};
use crate::failure::{Exit, Failure, Outcome};
use crate::progress::Progress;
use crate::{json, text};

/// The SQLite file that the settings name.
///
/// # Errors
/// Another kind of database, or no path.
pub fn file(config: &Config) -> Outcome<PathBuf> {
    let url = &config.database_url.value;
    let refuse = |why: String| Failure::usage(format!("{} (from {}): {why}", without_password(url), config.database_url.origin));
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(refuse(format!("is not a database URL; write `sqlite:{url}` for a file")));
    };
    match scheme {
        "sqlite" => {}
        "postgres" | "postgresql" | "sqlserver" | "mssql" => {
            return Err(refuse(format!("{scheme} is not supported by this version; write `sqlite:PATH`")));
        }
        other => return Err(refuse(format!("`{other}` is no kind of database that is known; write `sqlite:PATH`"))),
    }
    let path = rest.strip_prefix("//").unwrap_or(rest);
    match path {
        "" => Err(refuse("has no path; write `sqlite:PATH`".to_owned())),
        ":memory:" => Err(refuse("a database in memory would be gone with each command; write `sqlite:PATH`".to_owned())),
        path => Ok(PathBuf::from(path)),
    }
}

/// Opens a database that exists and is up to date.
///
/// # Errors
/// With the file and what to do.
pub async fn open(config: &Config) -> Outcome<SqliteStore> {
    let path = file(config)?;
    if !path.exists() {
        let message = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() && !parent.exists() => {
                format!("the directory {} does not exist", parent.display())
            }
            _ => format!(
                "there is no database {} (from {}); `warp-host migrate` creates it, and `warp-host run` does so by itself",
                path.display(),
                config.database_url.origin
            ),
        };
        return Err(Failure::new(Exit::Unavailable, message));
    }
    Ok(SqliteStore::open(OpenOptions { path, create: false, migrate: false }).await?)
}

/// `migrate`.
///
/// # Errors
/// A database that is newer than this build or no database, or what the store says.
pub async fn migrate(args: &MigrateArgs, config: &Config) -> Outcome {
    let path = file(config)?;
    let existed = path.exists();
    let names: Vec<&str> = if args.dry_run && !existed {
        warp_store_sqlite::MIGRATIONS.iter().map(|(name, _)| *name).collect()
    } else {
        warp_store_sqlite::migrate(&path, args.dry_run).await?
    };
    if config.json {
        return text::print_json(&json::Migrated {
            database: path.display().to_string(),
            created: !existed && !args.dry_run,
            dry_run: args.dry_run,
            migrations: names.iter().map(|name| (*name).to_owned()).collect(),
        });
    }
    if args.dry_run {
        for (name, sql) in warp_store_sqlite::MIGRATIONS.iter().filter(|(name, _)| names.contains(name)) {
            text::print(format!("-- {name}\n{sql}"))?;
        }
        if names.is_empty() {
            text::note(format!("{} is up to date", path.display()));
        }
        return Ok(());
    }
    text::print(match (existed, names.is_empty()) {
        (false, _) => format!("created {}", path.display()),
        (true, true) => format!("{} is up to date", path.display()),
        (true, false) => format!("{}: applied {}", path.display(), names.join(", ")),
    })
}

/// `backup`.
///
/// # Errors
/// An existing target, or what the store says.
pub async fn backup(args: &BackupArgs, config: &Config) -> Outcome {
    let path = file(config)?;
    if args.out.exists() {
        return Err(Failure::new(Exit::Refused, format!("{} exists already; name another file", args.out.display())));
    }
    let store = open(config).await?;
    let progress = Progress::spinner(format!("copying {}", path.display()));
    let copied = store.backup(&args.out).await;
    progress.finish();
    copied?;
    let bytes = std::fs::metadata(&args.out).map_or(0, |meta| meta.len());
    if config.json {
        return text::print_json(&json::BackedUp { database: path.display().to_string(), copy: args.out.display().to_string(), bytes });
    }
    text::print(format!("copied {} to {}, {bytes} bytes", path.display(), args.out.display()))
}
