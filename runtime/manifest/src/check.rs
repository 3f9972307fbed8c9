//! What `warp-host check` answers in an author's CI: the judgement of a host, without a host.

use std::fmt;
use std::fs;
use std::path::Path;

use warp_domain::Digest;

use crate::component::Surface;
use crate::imports::{HostWorld, check_imports};
use crate::load::load;
use crate::model::Manifest;
use crate::refusal::{Location, Refusal, RefusalKind, Warning};

/// Larger files are refused unread; the largest Python component that we know of has a tenth of it.
const LARGEST_FILE: u64 = 256 << 20;

/// Everything that is known about one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The file, as it was named.
    pub file: String,
    /// The manifest, if it could be read.
    pub manifest: Option<Manifest>,
    /// The plugin version, for a component.
    pub digest: Option<Digest>,
    /// What a component imports and exports.
    pub surface: Option<Surface>,
    /// Why a host would not load it.
    pub refusals: Vec<Refusal>,
    /// What is allowed and yet probably not meant.
    pub warnings: Vec<Warning>,
}

impl Report {
    /// Whether a host would load it, as far as can be told without its grants.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.refusals.is_empty()
    }
}

/// One line for each refusal and warning, then one that sums up.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.refusals.iter().try_for_each(|refusal| writeln!(f, "{refusal}"))?;
        self.warnings.iter().try_for_each(|warning| writeln!(f, "{warning}"))?;
        match (&self.manifest, self.refusals.len()) {
            (Some(manifest), 0) => {
                let (plugin, handlers) = (&manifest.plugin, manifest.handlers.len());
                write!(f, "{}: good: plugin {} {} with {handlers} handler", self.file, plugin.name, plugin.version)?;
                f.write_str(if handlers == 1 { "" } else { "s" })
            }
            (_, count) => write!(f, "{}: refused: {count} mistake{}", self.file, if count == 1 { "" } else { "s" }),
        }
    }
}

/// Judges a `.toml` or a `.wasm` (with the `.toml` of the same stem beside it, if there is one).
#[must_use]
pub fn check(path: &Path, world: &HostWorld) -> Report {
    let file = path.display().to_string();
    let mut report = Report { file: file.clone(), manifest: None, digest: None, surface: None, refusals: Vec::new(), warnings: Vec::new() };
    match judge(path, &file, world) {
        Ok(Judged { manifest, digest, surface, refusals }) => {
            report.warnings.clone_from(&manifest.warnings);
            report = Report { manifest: Some(manifest), digest, surface, refusals, ..report };
        }
        Err(refusals) => report.refusals = refusals,
    }
    report
}

struct Judged {
    manifest: Manifest,
    digest: Option<Digest>,
    surface: Option<Surface>,
    refusals: Vec<Refusal>,
}

fn judge(path: &Path, file: &str, world: &HostWorld) -> Result<Judged, Vec<Refusal>> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => {
            let manifest = Manifest::parse(&text(path)?, file)?;
            Ok(Judged { manifest, digest: None, surface: None, refusals: Vec::new() })
        }
        Some("wasm") => {
            let bytes = bytes(path)?;
            let beside = path.with_extension("toml");
            let sidecar = beside.exists().then(|| text(&beside)).transpose()?;
            let stem = path.with_extension("").display().to_string();
            let loaded = load(&stem, &bytes, sidecar.as_deref())?;
            let refusals = check_imports(file, &loaded.surface, &loaded.manifest, world);
            Ok(Judged { manifest: loaded.manifest, digest: Some(loaded.digest), surface: Some(loaded.surface), refusals })
        }
        _ => Err(io(file, "is neither `.toml` nor `.wasm`".to_owned(), "name a manifest or a component".to_owned())),
    }
}

fn text(path: &Path) -> Result<String, Vec<Refusal>> {
    let file = path.display().to_string();
    String::from_utf8(bytes(path)?).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        io(&file, format!("not UTF-8 from byte {valid} on"), "save it as UTF-8".to_owned())
    })
}

fn bytes(path: &Path) -> Result<Vec<u8>, Vec<Refusal>> {
    let file = path.display().to_string();
    let failed = |error: std::io::Error| io(&file, format!("failed to read it: {error}"), "check the path and its rights".to_owned());
    let size = fs::metadata(path).map_err(failed)?.len();
    if size > LARGEST_FILE {
        return Err(io(&file, format!("has {size} bytes"), format!("keep it within {LARGEST_FILE} bytes")));
    }
    fs::read(path).map_err(failed)
}

fn io(file: &str, problem: String, remedy: String) -> Vec<Refusal> {
    let location = Location { file: file.to_owned(), at: None, key: String::new() };
    vec![Refusal { kind: RefusalKind::Io, location, problem, remedy }]
}
