//! The servers that tests need: installs PostgreSQL and PgBouncer where they are absent, and runs one cluster for all
//! test processes.
//!
//! What must stay true: no server runs afterwards that did not run before. The cluster ends with this process, whatever
//! ends it (its guard lives in a process group that Ctrl-C does not reach), and an installation starts nothing.
//!
//! What it deliberately does not do: touch a server that the machine runs or its settings, decide what starts at the next
//! boot (that stays as the packages set it), or install anything but Debian's packages.

use std::process::Command;

use anyhow::{Context, Result, bail};
use warp_test_servers::{Cluster, missing};

/// Tells every test process where to make its databases. Set from outside, it names a server to use instead of ours.
pub const URL: &str = "WARP_TEST_POSTGRES_URL";

/// Installs what is missing; run as root, with the packages as arguments. Debian's packages start a server each when they
/// are installed. Two files keep them from it, and are removed at the end.
const INSTALL: &str = r#"
set -eu
export DEBIAN_FRONTEND=noninteractive
settings=/etc/postgresql-common/createcluster.d/warp-test.conf
policy=/usr/sbin/policy-rc.d
made=$settings
trap 'rm -f $made' EXIT
trap 'exit 130' INT TERM HUP
mkdir -p "${settings%/*}"
echo 'create_main_cluster = off' >"$settings"
if [ ! -e "$policy" ]; then
    made="$made $policy"
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt="apt-get -qq -o DPkg::Lock::Timeout=300"
$apt update
$apt install --yes --no-install-recommends "$@"
"#;

/// Installs PostgreSQL and PgBouncer unless they are there.
pub fn install() -> Result<()> {
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }
    let packages = packages.join(" ");
    let by_hand = format!("install {packages} (PostgreSQL 15 or later), or set WARP_TEST_PG_BIN and WARP_TEST_PGBOUNCER");
    if !succeeds("apt-get", &["--version"]) {
        bail!("missing: {packages}, and there is no apt-get to install it: {by_hand}");
    }
    let mut install = if is_root() {
        Command::new("sh")
    } else if succeeds("sudo", &["-n", "true"]) {
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "sh"]);
        sudo
    } else {
        bail!("missing: {packages}, and this is neither root nor does sudo work without a password: {by_hand}");
    };
    println!("Installing {packages} …");
    let status = install.args(["-c", INSTALL, "install"]).args(packages.split(' ')).status().context("failed to start apt-get")?;
    let left = missing();
    if !status.success() || !left.is_empty() {
        bail!("apt-get ended with {status}, still missing: {}: {by_hand}", left.join(" "));
    }
    Ok(())
}

/// Where the databases of this run are made.
pub enum Server {
    /// Somebody else's, which stays.
    Given,
    /// Ours, which ends when this is dropped.
    Own(Cluster),
}

impl Server {
    /// Starts one, unless one is given.
    pub fn start() -> Result<Self> {
        if std::env::var_os(URL).is_some() {
            return Ok(Self::Given);
        }
        Ok(Self::Own(Cluster::functional().start()?))
    }

    /// Names it to a command.
    pub fn name_to(&self, command: &mut Command) {
        if let Self::Own(cluster) = self {
            command.env(URL, cluster.url("postgres"));
        }
    }
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Whether a command runs and succeeds. What it prints is of no interest.
fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}
