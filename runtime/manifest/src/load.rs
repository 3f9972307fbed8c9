//! One plugin file, with or without a sidecar, as far as it can be judged before it is compiled.

use sha2::{Digest as _, Sha256};
use warp_domain::Digest;

use crate::component::{self, ComponentError, Interface, SECTION, Surface};
use crate::model::Manifest;
use crate::refusal::{Location, Position, Refusal, RefusalKind, Warning};

/// A plugin version that may be compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// What it declares.
    pub manifest: Manifest,
    /// SHA-256 over the file, and over the sidecar's text behind it where the sidecar decides. A sidecar equal to
    /// the packed section changes nothing, so that removing it is no new version.
    pub digest: Digest,
    /// What is allowed and yet probably not meant.
    pub warnings: Vec<Warning>,
    /// What it imports and exports, for [`crate::check_imports`].
    pub surface: Surface,
}

impl Loaded {
    /// What it imports.
    #[must_use]
    pub fn imports(&self) -> &[Interface] {
        &self.surface.imports
    }
}

/// Reads a component and its manifest. `stem` is the path without its extension; refusals print `<stem>.wasm` or
/// `<stem>.toml`. `sidecar` is the text of the latter, if there is one.
///
/// # Errors
/// Every refusal of the file, its section and its manifest.
pub fn load(stem: &str, bytes: &[u8], sidecar: Option<&str>) -> Result<Loaded, Vec<Refusal>> {
    let wasm = format!("{stem}.wasm");
    let toml = format!("{stem}.toml");
    let (section, surface) = component::read_with_surface(bytes).map_err(|error| vec![of_component(&wasm, &error)])?;
    let (text, name, digest) = match (section, sidecar) {
        (None, None) => return Err(vec![no_manifest(&wasm, &toml)]),
        (Some(section), Some(sidecar)) if section != sidecar => return Err(vec![two_texts(&wasm, &toml, section, sidecar)]),
        (Some(section), _) => (section, format!("{wasm} ({SECTION})"), digest_of(&[bytes])),
        (None, Some(sidecar)) => (sidecar, toml, digest_of(&[bytes, sidecar.as_bytes()])),
    };
    let manifest = Manifest::parse(text, &name)?;
    let warnings = manifest.warnings.clone();
    Ok(Loaded { manifest, digest, warnings, surface })
}

/// A component error as a refusal: its text up to the last `; ` says what is wrong, the rest what to do.
pub(crate) fn of_component(file: &str, error: &ComponentError) -> Refusal {
    let text = error.to_string();
    let (problem, remedy) = text.rsplit_once("; ").unwrap_or((&text, "build the file again"));
    refusal(file, None, problem.to_owned(), remedy.to_owned())
}

fn digest_of(parts: &[&[u8]]) -> Digest {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    Digest(hash.finalize().into())
}

fn no_manifest(wasm: &str, toml: &str) -> Refusal {
    let problem = format!("the component carries no manifest, and there is no `{toml}` beside it");
    let remedy = "run `warp-host pack` on it as the last step of the build: `wasm-tools strip` removes what was packed before";
    refusal(wasm, None, problem, remedy.to_owned())
}

fn two_texts(wasm: &str, toml: &str, section: &str, sidecar: &str) -> Refusal {
    let differs = section.bytes().zip(sidecar.bytes()).take_while(|(left, right)| left == right).count();
    let at = Position::of(sidecar, floor_boundary(sidecar, differs));
    let problem = format!("differs from the manifest packed into `{wasm}`, so one of the two was not reviewed with this code");
    refusal(toml, Some(at), problem, "remove it, or pack it into the component that the build wrote".to_owned())
}

/// The last character boundary at or before byte `at`.
fn floor_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

fn refusal(file: &str, at: Option<Position>, problem: String, remedy: String) -> Refusal {
    let location = Location { file: file.to_owned(), at, key: String::new() };
    Refusal { kind: RefusalKind::Component, location, problem, remedy }
}
