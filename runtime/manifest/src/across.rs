//! What several plugins of one host say about each other.

use std::collections::BTreeMap;

use crate::model::{DeclaredKey, Manifest};
use crate::refusal::{Location, Refusal, RefusalKind, Warning};

/// What was found; refusals name the later plugin of two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AcrossReport {
    /// Plugins that must not serve beside an earlier one, each with its place in the list that was given.
    pub refusals: Vec<(usize, Refusal)>,
    /// What is allowed and yet probably not meant.
    pub warnings: Vec<Warning>,
}

/// Compares plugins in the order in which they were loaded: the earlier one keeps what both claim. What one file
/// says against itself is not repeated here.
#[must_use]
pub fn warnings_across(manifests: &[&Manifest]) -> AcrossReport {
    let mut report = AcrossReport::default();
    let mut names: BTreeMap<&str, &Manifest> = BTreeMap::new();
    let mut contracts: BTreeMap<&str, &Manifest> = BTreeMap::new();
    let mut keys: BTreeMap<&str, (&Manifest, &DeclaredKey)> = BTreeMap::new();
    for (at, manifest) in manifests.iter().copied().enumerate() {
        let mut refuse = |location, problem, remedy: &str| {
            let refusal = Refusal { kind: RefusalKind::Taken, location, problem, remedy: remedy.to_owned() };
            report.refusals.push((at, refusal));
        };
        let refused_before = |file: &str| Location { file: file.to_owned(), at: None, key: "plugin.name".to_owned() };
        if let Some(earlier) = names.get(manifest.plugin.name.as_str()) {
            let problem = format!("plugin `{}` is loaded from {} already", manifest.plugin.name, earlier.file);
            refuse(refused_before(&manifest.file), problem, "remove one of the two files, or give the plugin another name");
            continue;
        }
        let mut taken = false;
        for (contract, handler) in manifest.handled() {
            let Some(earlier) = contracts.get(contract) else { continue };
            let place = manifest.handlers.get(handler).map(|handler| handler.at);
            let location = Location { file: manifest.file.clone(), at: place, key: format!("handler.{}", crate::text::toml_key(handler)) };
            let problem = format!("contract `{contract}` is run by plugin `{}` already", earlier.plugin.name);
            refuse(location, problem, "a job has one handler: remove one of the two");
            taken = true;
        }
        if taken {
            continue;
        }
        names.insert(&manifest.plugin.name, manifest);
        contracts.extend(manifest.handled().map(|(contract, _)| (contract, manifest)));
        for key in &manifest.keys {
            let (owner, first) = *keys.entry(&key.template).or_insert((manifest, key));
            if std::ptr::eq(owner, manifest) {
                continue;
            }
            if let Some(problem) = key.disagrees_with(first) {
                let location = Location { file: manifest.file.clone(), at: Some(key.position), key: key.path.clone() };
                let problem = format!("{problem} in plugin `{}`", owner.plugin.name);
                report.warnings.push(Warning { location, problem, remedy: DeclaredKey::REMEDY.to_owned() });
            }
        }
    }
    report
}
