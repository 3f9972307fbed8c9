//! Compiled code on disk, by the digest of the component and the settings of the engine.
//!
//! What must stay true:
//! - What is loaded from here runs as native code, so the directory belongs to this user alone, and a file is
//!   used only if it is byte for byte what was written: its checksum stands in a second file.
//! - A file that is damaged, cut, empty or of another engine is a miss and nothing else.
//! - A file in use is mapped into memory, so nothing is ever written in place: new content comes under another
//!   name and is renamed over.
//!
//! What it deliberately does not do: decide whether a component may run, or compile it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, MetadataExt, OpenOptions};
use sha2::{Digest as _, Sha256};
use warp_domain::Digest;
use wasmtime::component::Component;

/// Beyond this, what was used longest ago goes first. A Python component takes 34 MiB.
const MAX_BYTES: u64 = 2 << 30;
/// A file under a temporary name that is older was left behind by a process that died.
const STALE: Duration = Duration::from_secs(3600);
const TEMPORARY: &str = ".tmp-";

/// A directory of compiled components. Several hosts may share it.
pub struct Cache {
    dir: Dir,
    /// The engine maps files by path only. The directory is private, so the name and the handle agree.
    path: PathBuf,
    settings: u64,
    written: AtomicU64,
}

impl Cache {
    /// Opens the directory and creates it, for this user alone, if it is absent.
    ///
    /// # Errors
    /// When it cannot be created or opened, or when somebody else could write to it.
    pub fn open(path: &Path, engine: &crate::Engine) -> io::Result<Self> {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let path = path.canonicalize()?;
        let dir = Dir::open_ambient_dir(&path, ambient_authority())?;
        let about = dir.dir_metadata()?;
        if about.uid() != rustix::process::geteuid().as_raw() || about.mode() & 0o022 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "{} holds code that this host runs, and somebody else may write to it; `chmod 700` it or name another",
                    path.display()
                ),
            ));
        }
        let mut settings = DefaultHasher::new();
        engine.raw().precompile_compatibility_hash().hash(&mut settings);
        let cache = Cache { dir, path, settings: settings.finish(), written: AtomicU64::new(0) };
        if let Err(e) = cache.prune() {
            tracing::warn!(error = %e, directory = %cache.path.display(), "failed to tidy the cache of compiled code");
        }
        Ok(cache)
    }

    fn stem(&self, code: Digest) -> String {
        let hex: String = code.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}-{:016x}", self.settings)
    }

    /// The compiled component, or `None` if it has to be compiled.
    pub(crate) fn load(&self, engine: &wasmtime::Engine, code: Digest) -> Option<Component> {
        let stem = self.stem(code);
        match self.load_checked(engine, &stem) {
            Ok(component) => component,
            Err(why) => {
                tracing::warn!(file = %stem, reason = %why, "compiled code in the cache is not usable; compiling again");
                None
            }
        }
    }

    fn load_checked(&self, engine: &wasmtime::Engine, stem: &str) -> Result<Option<Component>, String> {
        let (name, sum) = names(stem);
        let expected = match self.dir.read_to_string(&sum) {
            Ok(expected) => expected,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(format!("failed to read its checksum: {e}")),
        };
        let mut file = match self.dir.open(&name) {
            Ok(file) => file.into_std(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(format!("failed to open it: {e}")),
        };
        let mut hasher = Sha256::new();
        io::copy(&mut file, &mut HashWriter(&mut hasher)).map_err(|e| format!("failed to read it: {e}"))?;
        if hex(&hasher.finalize()) != expected {
            return Err("its checksum differs".to_owned());
        }
        // Marks it as used, for `prune`; a file system without times only makes that less exact.
        let _ = file.set_modified(SystemTime::now());
        // SAFETY: the file is what this program wrote with the same engine settings, as its checksum shows, in a
        // directory where nobody else can write, and it is never written in place.
        unsafe { Component::deserialize_file(engine, self.path.join(&name)) }.map(Some).map_err(|e| format!("{e:#}"))
    }

    /// Keeps compiled code. A failure costs a compilation at the next start and is logged by the caller.
    pub(crate) fn keep(&self, code: Digest, compiled: &[u8]) -> io::Result<()> {
        let (name, sum) = names(&self.stem(code));
        // The checksum last: without it the code counts as absent.
        self.write(&name, compiled)?;
        self.write(&sum, hex(&Sha256::digest(compiled)).as_bytes())
    }

    fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let aside = format!("{TEMPORARY}{}-{}", std::process::id(), self.written.fetch_add(1, Ordering::Relaxed));
        let write = || {
            let mut file = self.dir.open_with(&aside, OpenOptions::new().write(true).create_new(true))?;
            file.write_all(content)?;
            file.sync_all()?;
            self.dir.rename(&aside, &self.dir, name)
        };
        write().inspect_err(|_| {
            let _ = self.dir.remove_file(&aside);
        })
    }

    /// Removes what a dead process left and, beyond [`MAX_BYTES`], what was used longest ago. A removed file that
    /// is mapped stays readable for whoever has it.
    fn prune(&self) -> io::Result<()> {
        let now = SystemTime::now();
        let mut kept = Vec::new();
        for entry in self.dir.entries()? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let about = entry.metadata()?;
            let used = about.modified()?.into_std();
            if name.starts_with(TEMPORARY) {
                if now.duration_since(used).unwrap_or_default() > STALE {
                    self.dir.remove_file(&name)?;
                }
            } else if let Some(stem) = name.strip_suffix(".cwasm") {
                kept.push((used, about.len(), stem.to_owned()));
            }
        }
        kept.sort();
        let mut total: u64 = kept.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, stem) in kept {
            if total <= MAX_BYTES {
                break;
            }
            let (name, sum) = names(&stem);
            self.dir.remove_file(sum)?;
            self.dir.remove_file(name)?;
            total -= bytes;
        }
        Ok(())
    }
}

fn names(stem: &str) -> (String, String) {
    (format!("{stem}.cwasm"), format!("{stem}.sum"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
