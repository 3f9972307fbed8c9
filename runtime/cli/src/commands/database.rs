//! `migrate` and `backup`: making a database, bringing it up to date, copying it.

use std::path::Path;

use warp_store_postgres::{ConnectSettings, LockKind};
use warp_store_sqlite::{OpenOptions, SqliteStore};

use crate::args::{BackupArgs, Locks, MigrateArgs};
use crate::config::Config;
use crate::failure::{Exit, Failure, Outcome};
use crate::progress::Progress;
use crate::stores::{self, Place};
use crate::{json, text};

/// `migrate`.
///
/// # Errors
/// A database that is newer than this build or no database, or what the store says.
pub async fn migrate(args: &MigrateArgs, config: &Config) -> Outcome {
    match stores::place(config)? {
        Place::Sqlite(path) => migrate_file(args, config, &path).await,
        Place::Postgres(settings) => migrate_server(args, config, &settings).await,
    }
}

async fn migrate_file(args: &MigrateArgs, config: &Config, path: &Path) -> Outcome {
    if args.sql {
        return print_sql(warp_store_sqlite::MIGRATIONS.iter().copied());
    }
    if args.locks == Some(Locks::Session) {
        return Err(Failure::new(Exit::Refused, stores::ONLY_LEDGER));
    }
    let existed = path.exists();
    let names: Vec<&str> = if args.dry_run && !existed {
        warp_store_sqlite::MIGRATIONS.iter().map(|(name, _)| *name).collect()
    } else {
        warp_store_sqlite::migrate(path, args.dry_run).await?
    };
    let done = Migration {
        database: path.display().to_string(),
        created: (!existed).then(|| path.display().to_string()),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
    };
    done.say(args, config, || print_sql(warp_store_sqlite::MIGRATIONS.iter().copied().filter(|(name, _)| names.contains(name))))
}

async fn migrate_server(args: &MigrateArgs, config: &Config, settings: &ConnectSettings) -> Outcome {
    // A setting is a wish like the flag: a new database gets what its hosts are going to expect.
    let locks = args.locks.or(config.database.locks.value).map(stores::kind_of);
    let script = |version| warp_store_postgres::migration_sql(&settings.schema, locks.unwrap_or(LockKind::Ledger), version);
    if args.sql {
        return text::print(script(0)?);
    }
    let before = warp_store_postgres::schema_version(settings).await?;
    let names = warp_store_postgres::migrate(settings, locks, args.dry_run).await?;
    let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
    let database = stores::shown(settings);
    let created = (before == 0 && !names.is_empty()).then(|| format!("the schema {} in {}", settings.schema, stores::address(settings)));
    let done = Migration { database, created, names };
    let any = !done.names.is_empty();
    done.say(args, config, || if any { text::print(script(before)?) } else { Ok(()) })
}

/// What `migrate` did, or would do.
struct Migration {
    database: String,
    /// What was made, if it was not there.
    created: Option<String>,
    names: Vec<String>,
}

impl Migration {
    fn say(self, args: &MigrateArgs, config: &Config, print_sql: impl FnOnce() -> Outcome) -> Outcome {
        let Migration { database, created, names } = self;
        if config.json {
            return text::print_json(&json::Migrated {
                database,
                created: created.is_some() && !args.dry_run,
                dry_run: args.dry_run,
                migrations: names,
            });
        }
        if args.dry_run {
            print_sql()?;
            if names.is_empty() {
                text::note(format!("{database} is up to date"));
            }
            return Ok(());
        }
        text::print(match (created, names.is_empty()) {
            (Some(what), _) => format!("created {what}"),
            (None, true) => format!("{database} is up to date"),
            (None, false) => format!("{database}: applied {}", names.join(", ")),
        })
    }
}

fn print_sql(migrations: impl IntoIterator<Item = (&'static str, &'static str)>) -> Outcome {
    migrations.into_iter().try_for_each(|(name, sql)| text::print(format!("-- {name}\n{sql}")))
}

/// `backup`.
///
/// # Errors
/// An existing target, a database on a server, or what the store says.
pub async fn backup(args: &BackupArgs, config: &Config) -> Outcome {
    let path = match stores::place(config)? {
        Place::Sqlite(path) => path,
        Place::Postgres(settings) => {
            let schema = &settings.schema;
            return Err(Failure::new(
                Exit::Refused,
                format!("a database on a server is copied by its own tools: `pg_dump --format=custom --schema={schema}`, and `pg_restore`"),
            ));
        }
    };
    if args.out.exists() {
        return Err(Failure::new(Exit::Refused, format!("{} exists already; name another file", args.out.display())));
    }
    let store = SqliteStore::open(OpenOptions { path: stores::existing(path.clone(), config)?, create: false, migrate: false }).await?;
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
