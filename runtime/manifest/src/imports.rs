//! Whether a host has what a component imports, and the component what a host calls.
//!
//! Versions match by major (by minor below 1.0). Whether the functions of an interface fit is for the engine to
//! say when it links; here every refusal can name both versions, which the engine's message does not.

use std::collections::BTreeSet;

use crate::component::{Interface, Surface};
use crate::model::Manifest;
use crate::refusal::{Location, Refusal, RefusalKind};
use crate::support::{HOST_VERSION, enforced};
use crate::text::shown;

/// The function that the host calls.
const HANDLE: &str = "handle";
/// The package of the contract between host and handler.
const JOB_PACKAGE: &str = "warp:job";

/// One interface that a host offers.
pub type Offer = Interface;

/// What a host offers to guests. The caller knows; this crate does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostWorld {
    /// Every interface, with its version.
    pub offers: Vec<Offer>,
}

impl HostWorld {
    /// From texts such as `warp:job/log@1.0.0`.
    #[must_use]
    pub fn of(interfaces: &[&str]) -> Self {
        HostWorld { offers: interfaces.iter().map(|text| Interface::parse(text)).collect() }
    }

    fn version_of(&self, package: &str) -> Option<&str> {
        self.offers.iter().find(|offer| offer.package == package).map(|offer| offer.version.as_str())
    }
}

/// Compares what a component shows with what a host offers and its manifest asks for. `file` is only printed.
#[must_use]
pub fn check_imports(file: &str, surface: &Surface, manifest: &Manifest, world: &HostWorld) -> Vec<Refusal> {
    let refuse = |Problem { kind, problem, remedy, .. }: Problem| {
        let location = Location { file: file.to_owned(), at: None, key: String::new() };
        Refusal { kind, location, problem, remedy }
    };
    let mut said: BTreeSet<(&str, &str)> = BTreeSet::new();
    let mut refusals = Vec::new();
    for wanted in &surface.imports {
        let Some(problem) = import_problem(wanted, manifest, world) else { continue };
        if problem.of_interface || said.insert((&wanted.package, &wanted.version)) {
            refusals.push(refuse(problem));
        }
    }
    if !surface.functions.iter().any(|name| name == HANDLE) {
        refusals.push(refuse(missing_export(surface, world)));
    }
    refusals
}

struct Problem {
    kind: RefusalKind,
    /// Whether it concerns this interface alone. What concerns a whole package is said once.
    of_interface: bool,
    problem: String,
    remedy: String,
}

fn import_problem(wanted: &Interface, manifest: &Manifest, world: &HostWorld) -> Option<Problem> {
    let plugin = format!("the plugin imports `{}`", shown(&wanted.to_string()));
    let of_package = |problem: String, remedy: &str| {
        Some(Problem { kind: RefusalKind::Imports, of_interface: false, problem, remedy: remedy.to_owned() })
    };
    let of_interface = |problem, remedy| of_package(problem, remedy).map(|problem| Problem { of_interface: true, ..problem });
    if wanted.package == "wasi:http" {
        if !enforced("capabilities.http") {
            let problem = format!("{plugin}, and requests to the network are not supported by this version (warp-host {HOST_VERSION})");
            let refused = of_package(problem, "build it without an HTTP client");
            return refused.map(|problem| Problem { kind: RefusalKind::NotSupported, ..problem });
        }
        if manifest.capabilities.http.is_empty() {
            return of_package(format!("{plugin}, and its manifest asks for no origin"), "add `http` to `[capabilities]`");
        }
    }
    if wanted.package == JOB_PACKAGE && wanted.name == "state" && manifest.capabilities.state.is_empty() {
        let remedy = "add `state = [{ bucket = \"…\" }]` to `[capabilities]`, or build against the world `handler`";
        return of_interface(format!("{plugin}, and its manifest asks for no bucket"), remedy);
    }
    let same_name = |offer: &&Offer| offer.package == wanted.package && offer.name == wanted.name;
    if world.offers.iter().filter(same_name).any(|offer| compatible(&wanted.version, &offer.version)) {
        return None;
    }
    match world.offers.iter().find(same_name).map(|offer| offer.version.as_str()).or_else(|| world.version_of(&wanted.package)) {
        Some(offered) if !compatible(&wanted.version, offered) => {
            let problem = format!("{plugin}, this host offers `{}@{offered}`", wanted.package);
            of_package(problem, "build it against that version, or load it into a host of the other")
        }
        Some(offered) => {
            let problem = format!("{plugin}, and `{}@{offered}` of this host has no such interface", wanted.package);
            of_interface(problem, "build it without that import, or load it into a newer host")
        }
        None => {
            let problem = format!("{plugin}, and this host offers nothing of `{}`", shown(&wanted.package));
            of_package(problem, "build it without that import; `warp-host wit` prints what a handler may import")
        }
    }
}

fn missing_export(surface: &Surface, world: &HostWorld) -> Problem {
    let version = world.version_of(JOB_PACKAGE).unwrap_or("1");
    let other_shape = surface.interfaces.iter().find(|interface| interface.package == JOB_PACKAGE || interface.package == HANDLE);
    let problem = match other_shape {
        Some(interface) => format!("the component exports `{}` and no function `{HANDLE}`", shown(&interface.to_string())),
        None => format!("the component exports no function `{HANDLE}`"),
    };
    let remedy = format!("build it against the world `handler` of `{JOB_PACKAGE}@{version}`, which `warp-host wit` prints");
    Problem { kind: RefusalKind::Imports, of_interface: true, problem, remedy }
}

/// Whether a host that offers `offered` serves a guest built against `wanted`.
fn compatible(wanted: &str, offered: &str) -> bool {
    // What decides is the first number that is not 0; a pre-release fits itself only.
    fn track(version: &str) -> Option<&str> {
        if version.contains(['-', '+']) {
            return Some(version);
        }
        let mut end = 0;
        for part in version.split('.') {
            end += part.len();
            if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            if part.bytes().any(|b| b != b'0') {
                break;
            }
            end += 1;
        }
        version.get(..end.min(version.len()))
    }
    wanted == offered || matches!((track(wanted), track(offered)), (Some(wanted), Some(offered)) if wanted == offered)
}

#[cfg(test)]
mod tests {
    use super::compatible;

    #[test]
    fn versions_match_by_their_first_number_that_is_not_zero() {
        for (wanted, offered, fits) in [
            ("1.0.0", "1.0.0", true),
            ("1.3.0", "1.0.0", true),
            ("2.0.0", "1.0.0", false),
            ("10.0.0", "1.0.0", false),
            ("0.2.0", "0.2.6", true),
            ("0.3.0", "0.2.6", false),
            ("0.2.0-rc-1", "0.2.6", false),
            ("0.2.0-rc-1", "0.2.0-rc-1", true),
            ("0.0.1", "0.0.2", false),
            ("", "1.0.0", false),
            ("one", "1.0.0", false),
        ] {
            assert_eq!(compatible(wanted, offered), fits, "{wanted} on {offered}");
        }
    }
}
