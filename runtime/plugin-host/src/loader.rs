//! From one file to a version that could serve: read, checked, compiled, linked. Nothing of it is visible to a job.
//!
//! What must stay true: everything that can refuse a file refuses it here, before a job could meet it; manifest,
//! grants and imports are judged before a byte is compiled; every refusal says what to do.
//!
//! What it deliberately does not do: decide when a file is read, or whether it may replace another.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use rustix::fs::{Mode, OFlags};
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;
use warp_domain::Digest;
use warp_manifest::{
    Commit, FileMode, Grant, Granted, GrantedFile, HostWorld, Loaded, MAX_MANIFEST_BYTES, Refusal, RefusalKind, WriteRule, check_grant,
    check_imports,
};

use crate::code::CodeLoader;
use crate::permissions::{Bucket, Directory, Permissions};
use crate::registry::PluginVersion;
use crate::runner::Runnable;
use crate::{Caps, Engine, PluginHostError};

/// The interfaces that a guest may import. Whoever adds one to the linker of `host` adds it here; the engine links
/// what is listed, so one too many is refused later and in worse words, and one too few refuses guests that would run.
pub const OFFERED: &[&str] = &[
    "warp:job/types@1.0.0",
    "warp:job/log@1.0.0",
    "warp:job/progress@1.0.0",
    "warp:job/cancellation@1.0.0",
    "warp:job/jobs@1.0.0",
    "warp:job/state@1.0.0",
    "wasi:io/error@0.2.12",
    "wasi:io/poll@0.2.12",
    "wasi:io/streams@0.2.12",
    "wasi:clocks/wall-clock@0.2.12",
    "wasi:clocks/monotonic-clock@0.2.12",
    "wasi:random/random@0.2.12",
    "wasi:random/insecure@0.2.12",
    "wasi:random/insecure-seed@0.2.12",
    "wasi:cli/environment@0.2.12",
    "wasi:cli/exit@0.2.12",
    "wasi:cli/stdin@0.2.12",
    "wasi:cli/stdout@0.2.12",
    "wasi:cli/stderr@0.2.12",
    "wasi:cli/terminal-input@0.2.12",
    "wasi:cli/terminal-output@0.2.12",
    "wasi:cli/terminal-stdin@0.2.12",
    "wasi:cli/terminal-stdout@0.2.12",
    "wasi:cli/terminal-stderr@0.2.12",
    "wasi:filesystem/types@0.2.12",
    "wasi:filesystem/preopens@0.2.12",
    "wasi:sockets/tcp@0.2.12",
    "wasi:sockets/tcp-create-socket@0.2.12",
    "wasi:sockets/udp@0.2.12",
    "wasi:sockets/udp-create-socket@0.2.12",
    "wasi:sockets/instance-network@0.2.12",
    "wasi:sockets/network@0.2.12",
    "wasi:sockets/ip-name-lookup@0.2.12",
];

/// What the operator allows, resolved by whoever reads configuration and environment.
#[derive(Debug, Clone, Default)]
pub struct Grants {
    /// `[grant.<plugin>]` by plugin.
    pub plugins: BTreeMap<String, Grant>,
    /// What a relative directory of a grant is relative to.
    pub base: PathBuf,
    /// The values of the environment variables that any grant names.
    pub env: BTreeMap<String, String>,
}

impl Grants {
    /// Where a granted directory lies.
    #[must_use]
    pub fn directory(&self, host: &str) -> PathBuf {
        // Component by component, so that `./in` beside `.` is not shown as `././in`.
        self.base.join(host).components().collect()
    }

    /// What is granted and cannot be opened. Asked before a file is loaded, so that a missing directory is a refused
    /// load and not a failed job.
    #[must_use]
    pub fn check_directories(&self, file: &str, granted: &Granted) -> Vec<Refusal> {
        let check = |directory: &GrantedFile| {
            let host = self.directory(&directory.host);
            let error = Dir::open_ambient_dir(&host, ambient_authority()).err()?;
            let problem = format!("directory `{}` is granted as {}, which cannot be opened: {error}", directory.path, host.display());
            Some(refusal(RefusalKind::Directory, file, problem, "create it, or correct the grant"))
        };
        granted.files.iter().filter_map(check).collect()
    }
}

/// Loads files. One per process.
pub struct Loader {
    engine: Arc<Engine>,
    code: CodeLoader,
    /// Of an attempt; `memory` is replaced by what each plugin is granted.
    caps: Caps,
    max_component_bytes: u64,
}

/// A file's content, before anything is made of it.
pub(crate) struct Source {
    stem: String,
    bytes: Arc<[u8]>,
    sidecar: Option<String>,
}

/// A file that may be compiled.
pub(crate) struct Checked {
    pub(crate) loaded: Loaded,
    file: String,
    bytes: Arc<[u8]>,
    code: Digest,
    permissions: Permissions,
    memory: u64,
}

impl Checked {
    /// Whether a version that serves has these very permissions.
    pub(crate) fn fits(&self, serving: &Runnable) -> bool {
        *serving.permissions() == self.permissions && serving.caps().memory == self.memory
    }
}

impl Loader {
    /// `max_component_bytes` is the largest file that is compiled. A Python component takes 18 to 24 MB.
    #[must_use]
    pub fn new(engine: Arc<Engine>, code: CodeLoader, caps: Caps, max_component_bytes: u64) -> Self {
        Loader { engine, code, caps, max_component_bytes }
    }

    /// Loads one file outside any directory of plugins, for `check`, `try` and benchmarks.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub async fn load_file(&self, path: &Path, grants: &Grants) -> Result<Arc<PluginVersion>, Vec<Refusal>> {
        self.load_file_within(path, grants, None).await
    }

    /// The same with another cap on memory than the manifest and its grant say.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub async fn load_file_within(&self, path: &Path, grants: &Grants, memory: Option<u64>) -> Result<Arc<PluginVersion>, Vec<Refusal>> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let shown = path.display().to_string();
        let file = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| vec![io_refusal(&shown, "it has no file name")])?;
        let dir = Dir::open_ambient_dir(folder, ambient_authority())
            .map_err(|e| vec![io_refusal(&shown, &format!("failed to open {}: {e}", folder.display()))])?;
        let mut checked = self.check(self.read(&dir, file)?, grants)?;
        checked.memory = memory.unwrap_or(checked.memory);
        Ok(Arc::new(self.build(checked, None).await?))
    }

    /// Reads a file and its sidecar. Symbolic links are followed, out of the directory too: whoever can place one
    /// there can place a plugin there.
    pub(crate) fn read(&self, dir: &Dir, file: &str) -> Result<Source, Vec<Refusal>> {
        let refuse = |problem: String| vec![io_refusal(file, &problem)];
        let stem = file.strip_suffix(".wasm").ok_or_else(|| refuse("its name does not end in `.wasm`".to_owned()))?.to_owned();
        let bytes = read_capped(dir, file, self.max_component_bytes)
            .and_then(|bytes| bytes.ok_or_else(|| "it is gone".to_owned()))
            .map_err(refuse)?;
        let toml = format!("{stem}.toml");
        let sidecar = read_capped(dir, &toml, MAX_MANIFEST_BYTES as u64)
            .and_then(|sidecar| sidecar.map(String::from_utf8).transpose().map_err(|e| format!("it is not UTF-8: {e}")))
            .map_err(|problem| vec![io_refusal(&toml, &problem)])?;
        Ok(Source { stem, bytes: bytes.into(), sidecar })
    }

    /// Judges manifest, imports and grants.
    pub(crate) fn check(&self, source: Source, grants: &Grants) -> Result<Checked, Vec<Refusal>> {
        let Source { stem, bytes, sidecar } = source;
        let file = format!("{stem}.wasm");
        let loaded = warp_manifest::load(&stem, &bytes, sidecar.as_deref())?;
        let mut refusals = check_imports(&file, &loaded.surface, &loaded.manifest, &HostWorld::of(OFFERED));
        let granted = match check_grant(&loaded.manifest, grants.plugins.get(&loaded.manifest.plugin.name)) {
            Ok(granted) => Some(granted),
            Err(refusal) => {
                refusals.push(*refusal);
                None
            }
        };
        let permissions = granted.and_then(|granted| match permissions(&loaded, &granted, grants, is_go(&bytes)) {
            Ok(permissions) => Some((permissions, granted.memory)),
            Err(more) => {
                refusals.extend(more);
                None
            }
        });
        match permissions {
            Some((permissions, memory)) if refusals.is_empty() => {
                for warning in &loaded.warnings {
                    tracing::warn!(file, "{}: {}; {}", warning.location, warning.problem, warning.remedy);
                }
                let code = Digest(Sha256::digest(&bytes).into());
                Ok(Checked { loaded, file, bytes, code, permissions, memory })
            }
            _ => Err(refusals),
        }
    }

    /// Compiles and links. `gone` hears when the version is dropped.
    pub(crate) async fn build(&self, checked: Checked, gone: Option<Arc<Notify>>) -> Result<PluginVersion, Vec<Refusal>> {
        let Checked { loaded, file, bytes, code, permissions, memory } = checked;
        let refuse = |error: PluginHostError| {
            let rebuild = "build it again for this host, or restore the version before it";
            let (kind, remedy) = match error {
                PluginHostError::Link(_) => (RefusalKind::Imports, rebuild),
                PluginHostError::Unfit(_) => {
                    (RefusalKind::Component, "allow it more memory: in the manifest and its grant, or with --memory")
                }
                _ => (RefusalKind::Component, rebuild),
            };
            vec![refusal(kind, &file, error.to_string(), remedy)]
        };
        let component = self.code.component(bytes, code).await.map_err(refuse)?;
        let caps = Caps { memory, ..self.caps.clone() };
        let runnable = Runnable::new(Arc::clone(&self.engine), &component, loaded.digest, permissions, caps).map_err(refuse)?;
        Ok(PluginVersion::new(loaded.manifest, loaded.digest, runnable, gone))
    }
}

/// What is granted, as this machine has it.
fn permissions(loaded: &Loaded, granted: &Granted, grants: &Grants, go: bool) -> Result<Permissions, Vec<Refusal>> {
    let file = &loaded.manifest.file;
    let mut refusals = grants.check_directories(file, granted);
    let mut permissions = Permissions::default();
    for directory in &granted.files {
        let host = grants.directory(&directory.host);
        let guest = format!("/{}", directory.path.trim_start_matches('/'));
        permissions.files.push(Directory { host, guest, writable: directory.mode == FileMode::Write });
    }
    for name in &granted.env {
        match grants.env.get(name) {
            Some(value) => permissions.env.push((name.clone(), value.clone())),
            None => {
                let problem = format!("variable `{name}` is granted and not set in the environment of this host");
                refusals.push(refusal(RefusalKind::Grant, file, problem, "set it where the host is started"));
            }
        }
    }
    for bucket in &granted.state {
        permissions.buckets.push(Bucket {
            name: bucket.bucket.clone(),
            under_mutex: bucket.write == WriteRule::UnderMutex,
            at_once: bucket.commit == Commit::Now,
        });
    }
    // Go's collector asks for the time; inside `cabi_realloc` no import may be called, and the guest traps. An
    // instance lives for one attempt under a memory cap, so it needs no collector.
    if go && !permissions.env.iter().any(|(name, _)| name == "GOGC") {
        permissions.env.push(("GOGC".to_owned(), "off".to_owned()));
    }
    if refusals.is_empty() { Ok(permissions) } else { Err(refusals) }
}

/// Whether the Go linker wrote the file: its `producers` section names the language, each name behind its length.
fn is_go(bytes: &[u8]) -> bool {
    const LANGUAGE: &[u8] = b"\x08language";
    const GO: &[u8] = b"\x02Go";
    // Behind the field's name stands the number of values, and Go's linker writes one.
    let at_go = |at: usize| bytes.get(at + LANGUAGE.len() + 1..).is_some_and(|rest| rest.starts_with(GO));
    memchr::memmem::find_iter(bytes, LANGUAGE).any(at_go)
}

/// `None` if there is no such file.
fn read_capped(dir: &Dir, name: &str, cap: u64) -> Result<Option<Vec<u8>>, String> {
    // Without waiting, because a pipe that somebody named like a plugin would never open.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(e) => return Err(format!("failed to open it: {e}")),
    };
    let about = file.metadata().map_err(|e| format!("failed to read it: {e}"))?;
    if !about.is_file() {
        return Err("it is not a file".to_owned());
    }
    if about.len() > cap {
        return Err(format!("it has {} bytes; at most {cap} are read", about.len()));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(about.len()).unwrap_or(0));
    // One more than the cap, so that a file that grows while it is read is noticed.
    file.by_ref().take(cap + 1).read_to_end(&mut bytes).map_err(|e| format!("failed to read it: {e}"))?;
    if bytes.len() as u64 > cap {
        return Err(format!("it has more than {cap} bytes"));
    }
    Ok(Some(bytes))
}

pub(crate) fn refusal(kind: RefusalKind, file: &str, problem: String, remedy: &str) -> Refusal {
    let location = warp_manifest::Location { file: file.to_owned(), at: None, key: String::new() };
    Refusal { kind, location, problem, remedy: remedy.to_owned() }
}

fn io_refusal(file: &str, problem: &str) -> Refusal {
    refusal(RefusalKind::Io, file, problem.to_owned(), "check the file and its permissions")
}

#[cfg(test)]
mod tests {
    use super::is_go;

    #[test]
    fn a_go_component_is_known_by_its_producers() {
        assert!(is_go(b"..\x09producers\x02\x08language\x01\x02Go\x081.27.3.."));
        assert!(!is_go(b"..\x09producers\x01\x08language\x01\x04Rust\x00.. \x02Go"));
    }
}
