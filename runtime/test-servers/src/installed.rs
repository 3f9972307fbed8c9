//! Where the servers' programs are on this machine.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::Error;

/// The oldest version of PostgreSQL that the product supports.
const OLDEST: u32 = 15;

/// Packages of Debian and Ubuntu whose programs are not here, or are too old. `cargo xtask test` installs them.
#[must_use]
pub fn missing() -> Vec<&'static str> {
    [("postgresql", postgresql().is_err()), ("pgbouncer", pgbouncer().is_err())]
        .into_iter()
        .filter_map(|(package, absent)| absent.then_some(package))
        .collect()
}

/// The directory of PostgreSQL's programs: what the environment says, else the first of PATH, else the newest installed.
pub(crate) fn postgresql() -> Result<PathBuf, Error> {
    const NEEDED: &[&str] = &["initdb", "postgres", "pg_ctl"];
    if let Some(directory) = env::var_os("WARP_TEST_PG_BIN").map(PathBuf::from) {
        return match postgresql_version(&directory) {
            Some(version) if version >= OLDEST => Ok(directory),
            Some(version) => {
                Err(Error::new("find PostgreSQL", format_args!("WARP_TEST_PG_BIN has version {version}; {OLDEST} or later is needed")))
            }
            None => Err(Error::new(
                "find PostgreSQL",
                format_args!("WARP_TEST_PG_BIN={} has no program `postgres` that runs", directory.display()),
            )),
        };
    }
    let mut installed: Vec<(u32, PathBuf)> = ["/usr/lib/postgresql", "/usr/local/lib/postgresql"]
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok())
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin")))
        })
        .collect();
    installed.sort();
    directory_with(NEEDED, installed.into_iter().rev().map(|(_, directory)| directory))
        .find(|directory| postgresql_version(directory).is_some_and(|version| version >= OLDEST))
        .ok_or_else(|| {
            Error::new(
                "find PostgreSQL",
                format_args!(
                    "version {OLDEST} or later is neither in PATH nor under /usr/lib/postgresql. `cargo xtask test` installs it on \
                     Debian and Ubuntu; elsewhere install it, or set WARP_TEST_PG_BIN to the directory of `initdb`, or \
                     WARP_TEST_POSTGRES_URL to a server whose user may create databases"
                ),
            )
        })
}

fn postgresql_version(programs: &Path) -> Option<u32> {
    // "postgres (PostgreSQL) 15.6 (Debian …)", "… 18beta1"
    let output = Command::new(programs.join("postgres")).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let number = text.split_whitespace().nth(2)?;
    number.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

/// Whether the installation has the library of pg_stat_statements. A cluster told to preload it without does not start.
pub(crate) fn has_statistics(programs: &Path) -> bool {
    let told = Command::new(programs.join("pg_config")).arg("--pkglibdir").output().ok();
    let told = told.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    // Where PATH has a link, the library is beside what it points to.
    let real = programs.join("postgres").canonicalize().ok();
    let beside = real.as_deref().and_then(Path::parent).and_then(Path::parent).map(|parent| parent.join("lib"));
    told.into_iter()
        .chain(beside)
        .any(|directory| ["so", "dylib"].iter().any(|ending| directory.join("pg_stat_statements").with_extension(ending).is_file()))
}

/// Where PgBouncer is: what the environment says, PATH, or the directories of daemons.
pub(crate) fn pgbouncer() -> Result<PathBuf, Error> {
    if let Some(program) = env::var_os("WARP_TEST_PGBOUNCER") {
        return Ok(program.into());
    }
    let daemons = ["/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin"].map(PathBuf::from);
    directory_with(&["pgbouncer"], daemons).next().map(|directory| directory.join("pgbouncer")).ok_or_else(|| {
        Error::new(
            "find PgBouncer",
            "it is neither in PATH nor in /usr/sbin. `cargo xtask test` installs it on Debian and Ubuntu; elsewhere install it, or \
             set WARP_TEST_PGBOUNCER to the program",
        )
    })
}

#[cfg(feature = "client")]
pub(crate) fn pgbouncer_version(program: &Path) -> Option<(u32, u32)> {
    // "PgBouncer 1.18.0"
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.lines().next()?.split_whitespace().nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The directories that hold all these programs: those of `PATH`, then the others.
fn directory_with(programs: &[&str], others: impl IntoIterator<Item = PathBuf>) -> impl Iterator<Item = PathBuf> {
    let path: Vec<PathBuf> = env::var_os("PATH").iter().flat_map(env::split_paths).collect();
    path.into_iter().chain(others).filter(move |directory| programs.iter().all(|program| directory.join(program).is_file()))
}
