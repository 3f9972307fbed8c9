//! The plugins directory: files become versions, versions replace each other, and nobody who runs notices.
//!
//! What must stay true:
//! - Whatever is wrong with a new file, what served before goes on serving, and the file is shown with its reasons.
//! - A version serves only after it was checked, compiled and linked aside; then one pointer is swapped.
//! - Whether content changed is decided by digest; the same bytes again are no new version.
//! - Of one plugin at most [`MAX_OLD_VERSIONS`] versions that serve no longer are kept alive by their attempts;
//!   beyond that, loading waits, so that fast replacement under long runs cannot fill the memory.
//! - A removed file stops serving; attempts on it finish.
//! - Each file is loaded on its own: one that takes long to compile delays nobody.
//! - A directory that cannot be read removes nothing.
//!
//! What it deliberately does not do: choose between two files that claim the same name or contract. The one that
//! served or was admitted first keeps it, in the order of file names at the first look.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use warp_domain::Digest;
use warp_manifest::{Manifest, Refusal, RefusalKind, warnings_across};

use crate::loader::{Checked, Grants, Loader};
use crate::registry::{PluginVersion, Registry};
use crate::watch::{Decision, Hints, Listing, Looks, list};

/// Versions of one plugin that serve no longer and still run attempts.
pub const MAX_OLD_VERSIONS: usize = 8;
/// How long to gather events before looking.
const BURST: Duration = Duration::from_millis(20);
/// Events that a slow listener may fall behind by; [`PluginDir::status`] has what they came to.
const EVENTS: usize = 256;

/// How to watch a directory.
#[derive(Debug, Clone)]
pub struct PluginDirConfig {
    /// The directory.
    pub path: PathBuf,
    /// What the operator allows.
    pub grants: Grants,
    /// How long a file must look the same before it is read.
    pub settle: Duration,
    /// How often to look without any hint.
    pub rescan: Duration,
}

impl PluginDirConfig {
    /// The usual times.
    #[must_use]
    pub fn new(path: PathBuf, grants: Grants) -> Self {
        PluginDirConfig { path, grants, settle: Duration::from_millis(150), rescan: Duration::from_secs(5) }
    }
}

/// A version as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionInfo {
    /// The plugin's name.
    pub plugin: String,
    /// The author's version.
    pub version: String,
    /// Code and manifest together.
    pub digest: Digest,
    /// What it runs.
    pub contracts: Vec<String>,
}

impl VersionInfo {
    fn of(manifest: &Manifest, digest: Digest) -> Self {
        VersionInfo {
            plugin: manifest.plugin.name.clone(),
            version: manifest.plugin.version.clone(),
            digest,
            contracts: manifest.handled().map(|(contract, _)| contract.to_owned()).collect(),
        }
    }
}

/// What has become of a file's latest content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Newest {
    /// It serves.
    Serving,
    /// It is being compiled.
    Compiling,
    /// Too many old versions of the plugin still run.
    Waiting {
        /// How many there are.
        old_versions: usize,
    },
    /// It will not serve, and this is why.
    Refused(Vec<Refusal>),
}

/// One file of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStatus {
    /// Its name.
    pub file: String,
    /// What of it serves, which may be older content than what is there.
    pub serving: Option<VersionInfo>,
    /// What has become of what is there.
    pub newest: Newest,
}

/// Something happened to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginEvent {
    /// It serves, and nothing of it did before.
    Loaded {
        /// Its name.
        file: String,
        /// What serves.
        version: VersionInfo,
    },
    /// Other content of it serves now.
    Replaced {
        /// Its name.
        file: String,
        /// What served before.
        old: VersionInfo,
        /// What serves.
        version: VersionInfo,
    },
    /// Its content will not serve.
    Refused {
        /// Its name.
        file: String,
        /// Why.
        reasons: Vec<Refusal>,
        /// What goes on serving in its place.
        kept: Option<VersionInfo>,
    },
    /// Loading waits for old versions to end.
    Waiting {
        /// Its name.
        file: String,
        /// How many there are.
        old_versions: usize,
    },
    /// It is gone, and what it ran is claimed no longer.
    Removed {
        /// Its name.
        file: String,
        /// What served.
        version: VersionInfo,
    },
}

type Statuses = Arc<Mutex<BTreeMap<String, FileStatus>>>;

/// A watched directory of plugins. Dropping it ends the watching; what serves goes on serving.
pub struct PluginDir {
    registry: Arc<Registry>,
    statuses: Statuses,
    events: broadcast::Sender<PluginEvent>,
    commands: mpsc::Sender<Command>,
    task: AbortHandle,
}

enum Command {
    Settle(oneshot::Sender<()>),
    Grants(Box<Grants>),
}

impl PluginDir {
    /// Starts to watch. Must be called on a tokio runtime. A directory that does not exist yet is waited for.
    #[must_use]
    pub fn open(config: PluginDirConfig, loader: Arc<Loader>) -> Self {
        let registry = Arc::<Registry>::default();
        let statuses = Statuses::default();
        let (events, _) = broadcast::channel(EVENTS);
        let (commands, incoming) = mpsc::channel(8);
        let PluginDirConfig { path, grants, settle, rescan } = config;
        let directory = Directory {
            loader,
            registry: Arc::clone(&registry),
            statuses: Arc::clone(&statuses),
            events: events.clone(),
            grants: Arc::new(grants),
            settle,
            rescan,
            looks: Looks::new(settle),
            hints: Hints::new(path.clone()),
            path,
            files: BTreeMap::new(),
            builds: JoinSet::new(),
            numbers: 0,
            old: BTreeMap::new(),
            gone: Arc::default(),
            settling: Vec::new(),
            unreadable: false,
        };
        let task = tokio::spawn(directory.serve(incoming)).abort_handle();
        PluginDir { registry, statuses, events, commands, task }
    }

    /// What serves.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Every file of the directory, by name.
    #[must_use]
    pub fn status(&self) -> Vec<FileStatus> {
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Events from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<PluginEvent> {
        self.events.subscribe()
    }

    /// Looks at once, and completes when every file that is there now serves, is refused, or waits for old versions.
    pub async fn settled(&self) {
        let (reply, answered) = oneshot::channel();
        // Without the task there is nothing to wait for.
        if self.commands.send(Command::Settle(reply)).await.is_ok() {
            let _ = answered.await;
        }
    }

    /// Puts other grants in force. Every file is judged again; one that is no longer granted what it asks for goes
    /// on serving what it served, and is shown as refused.
    pub async fn set_grants(&self, grants: Grants) {
        // Without the task there is nobody to judge.
        let _ = self.commands.send(Command::Grants(Box::new(grants))).await;
    }
}

impl Drop for PluginDir {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What the task knows about one file.
#[derive(Default)]
struct FileState {
    serving: Option<Arc<PluginVersion>>,
    newest: Option<Newest>,
    building: Option<Building>,
}

/// Content that is being compiled. It holds its plugin's name and contracts against other files.
struct Building {
    number: u64,
    manifest: Arc<Manifest>,
    abort: AbortHandle,
}

type Built = (String, u64, Result<PluginVersion, Vec<Refusal>>);

struct Directory {
    path: PathBuf,
    loader: Arc<Loader>,
    registry: Arc<Registry>,
    statuses: Statuses,
    events: broadcast::Sender<PluginEvent>,
    grants: Arc<Grants>,
    settle: Duration,
    rescan: Duration,
    looks: Looks,
    hints: Hints,
    files: BTreeMap<String, FileState>,
    builds: JoinSet<Built>,
    numbers: u64,
    /// Versions that serve no longer, by plugin.
    old: BTreeMap<String, Vec<Weak<PluginVersion>>>,
    /// Hears of every version that is dropped.
    gone: Arc<Notify>,
    /// Who waits for [`PluginDir::settled`].
    settling: Vec<oneshot::Sender<()>>,
    unreadable: bool,
}

impl Directory {
    async fn serve(mut self, mut commands: mpsc::Receiver<Command>) {
        let gone = Arc::clone(&self.gone);
        loop {
            self.look().await;
            let unsettled = self.looks.unsettled().next().is_some();
            if !unsettled && self.builds.is_empty() {
                for waiting in self.settling.drain(..) {
                    // Whoever asked may have gone.
                    let _ = waiting.send(());
                }
            }
            // A file that changes all the time is looked at all the time, never later than the settle time.
            let pause = if unsettled { self.settle } else { self.rescan };
            tokio::select! {
                // While a file is still being written the pause is short, and what is missing is not looked for so often.
                () = tokio::time::sleep(pause) => if !unsettled { self.retry_directories() },
                // Events come in bursts, and one look sees what all of a burst did.
                () = self.hints.hinted() => tokio::time::sleep(BURST).await,
                Some(built) = self.builds.join_next() => self.finish(built),
                () = gone.notified() => self.retry_waiting(),
                command = commands.recv() => match command {
                    Some(Command::Settle(reply)) => {
                        self.retry_directories();
                        self.settling.push(reply);
                    }
                    Some(Command::Grants(grants)) => {
                        self.grants = Arc::new(*grants);
                        let files: Vec<_> = self.files.keys().cloned().collect();
                        files.iter().for_each(|file| self.looks.reconsider(file));
                    }
                    None => return,
                },
            }
        }
    }

    /// One look at the directory, and everything that it decides.
    async fn look(&mut self) {
        // Watched before it is listed, so that nothing falls between the two.
        let path = self.path.clone();
        if let Ok(about) = rustix::fs::stat(&path) {
            #[expect(clippy::unnecessary_cast, reason = "the types of these fields differ between platforms")]
            self.hints.follow((about.st_dev as u64, about.st_ino as u64));
        }
        let listing = match tokio::task::spawn_blocking(move || list(&path)).await {
            Ok(Ok(listing)) => listing,
            Ok(Err(e)) => {
                if !std::mem::replace(&mut self.unreadable, true) {
                    self.warn_unreadable(&e);
                }
                return;
            }
            // The runtime is ending.
            Err(_) => return,
        };
        self.unreadable = false;
        self.hints.follow(listing.identity);
        let decisions = self.looks.look(Instant::now(), SystemTime::now(), &listing.files);
        let mut to_read = Vec::new();
        for decision in decisions {
            match decision {
                Decision::Remove(file) => self.remove(&file),
                Decision::Read(file) => to_read.push(file),
            }
        }
        if !to_read.is_empty() {
            self.read(listing, to_read).await;
        }
    }

    fn warn_unreadable(&self, error: &std::io::Error) {
        let directory = self.path.display();
        if self.files.values().any(|state| state.serving.is_some()) {
            tracing::warn!(%directory, %error, "the plugins directory cannot be read; what was loaded goes on serving");
        } else if error.kind() == ErrorKind::NotFound {
            tracing::warn!("no plugin is loaded: {directory} does not exist; it is watched for");
        } else {
            tracing::warn!(%error, "no plugin is loaded: {directory} cannot be read; it is tried again");
        }
    }

    /// Reads and judges files in the order of their names, so that which of two wins does not depend on their size.
    async fn read(&mut self, listing: Listing, files: Vec<String>) {
        let (loader, grants) = (Arc::clone(&self.loader), Arc::clone(&self.grants));
        let judge = move || {
            let judge_one = |file: String| {
                let checked = loader.read(&listing.dir, &file).and_then(|source| loader.check(source, &grants));
                (file, checked)
            };
            files.into_iter().map(judge_one).collect::<Vec<_>>()
        };
        let Ok(judged) = tokio::task::spawn_blocking(judge).await else { return };
        for (file, checked) in judged {
            match checked {
                Ok(checked) => self.admit(file, checked),
                Err(reasons) => {
                    self.stop_building(&file);
                    self.refuse(&file, reasons);
                }
            }
        }
    }

    fn admit(&mut self, file: String, checked: Checked) {
        self.stop_building(&file);
        let state = self.files.entry(file.clone()).or_default();
        let same = state.serving.as_ref().is_some_and(|serving| serving.digest() == checked.loaded.digest);
        // Judged again under other grants, the same digest is built again: its permissions may differ.
        let regranted = state.serving.as_ref().is_some_and(|serving| !checked.fits(serving.runnable()));
        if same && !regranted {
            self.set_newest(&file, Newest::Serving);
            return;
        }
        if let Some(refusals) = self.taken(&file, &checked.loaded.manifest) {
            self.refuse(&file, refusals);
            return;
        }
        let old_versions = self.old_versions(&checked.loaded.manifest.plugin.name);
        if old_versions >= MAX_OLD_VERSIONS {
            self.set_newest(&file, Newest::Waiting { old_versions });
            tracing::warn!(file, old_versions, "too many old versions of the plugin still run; the new one waits until one of them ends");
            self.emit(PluginEvent::Waiting { file, old_versions });
            return;
        }
        self.numbers += 1;
        let number = self.numbers;
        let manifest = Arc::new(checked.loaded.manifest.clone());
        let (loader, gone, name) = (Arc::clone(&self.loader), Arc::clone(&self.gone), file.clone());
        let abort = self.builds.spawn(async move {
            let built = loader.build(checked, Some(gone)).await;
            (name, number, built)
        });
        self.set_newest(&file, Newest::Compiling);
        if let Some(state) = self.files.get_mut(&file) {
            state.building = Some(Building { number, manifest, abort });
        }
    }

    /// What was being compiled is not what the file holds now.
    fn stop_building(&mut self, file: &str) {
        if let Some(building) = self.files.get_mut(file).and_then(|state| state.building.take()) {
            building.abort.abort();
            self.reconsider_taken();
        }
    }

    /// Refusals because of other files, which serve or are being compiled.
    fn taken(&self, file: &str, manifest: &Manifest) -> Option<Vec<Refusal>> {
        let others = || self.files.iter().filter(|(name, _)| *name != file).map(|(_, state)| state);
        let serving = others().filter_map(|state| state.serving.as_ref().map(|serving| serving.manifest()));
        let building = others()
            .filter(|state| state.serving.is_none())
            .filter_map(|state| state.building.as_ref().map(|building| &*building.manifest));
        let all: Vec<&Manifest> = serving.chain(building).chain([manifest]).collect();
        let report = warnings_across(&all);
        for warning in report.warnings.iter().filter(|warning| warning.location.file == manifest.file) {
            tracing::warn!(file, "{}: {}; {}", warning.location, warning.problem, warning.remedy);
        }
        let refusals: Vec<_> = report.refusals.into_iter().filter(|(at, _)| *at + 1 == all.len()).map(|(_, refusal)| refusal).collect();
        (!refusals.is_empty()).then_some(refusals)
    }

    fn old_versions(&mut self, plugin: &str) -> usize {
        let Some(old) = self.old.get_mut(plugin) else { return 0 };
        old.retain(|version| version.strong_count() > 0);
        old.len()
    }

    fn finish(&mut self, built: Result<Built, tokio::task::JoinError>) {
        let (file, number, built) = match built {
            Ok(built) => built,
            // Aborted because other content came; a panic is a defect of ours that must not end the watching.
            Err(e) => {
                if e.is_panic() {
                    tracing::error!(error = %e, "loading a plugin panicked; please report it");
                    self.forget_ended_builds();
                }
                return;
            }
        };
        let Some(state) = self.files.get_mut(&file) else { return };
        if state.building.as_ref().is_none_or(|building| building.number != number) {
            return;
        }
        state.building = None;
        match built {
            Err(reasons) => {
                self.refuse(&file, reasons);
                // It gave up the names that it held while it was compiled.
                self.reconsider_taken();
            }
            Ok(version) => self.swap_in(file, Arc::new(version)),
        }
    }

    /// After a panic nobody says which build it was.
    fn forget_ended_builds(&mut self) {
        let ended: Vec<_> = self
            .files
            .iter()
            .filter(|(_, state)| state.building.as_ref().is_some_and(|b| b.abort.is_finished()))
            .map(|(file, _)| file.clone())
            .collect();
        for file in ended {
            if let Some(state) = self.files.get_mut(&file) {
                state.building = None;
            }
            let why = "loading it made the host panic".to_owned();
            self.refuse(&file, vec![crate::loader::refusal(RefusalKind::Component, &file, why, "please report it")]);
        }
    }

    fn swap_in(&mut self, file: String, version: Arc<PluginVersion>) {
        let Some(state) = self.files.get_mut(&file) else { return };
        let info = VersionInfo::of(version.manifest(), version.digest());
        let old = state.serving.replace(version);
        self.publish();
        self.set_newest(&file, Newest::Serving);
        match old {
            Some(old) => {
                let old_info = VersionInfo::of(old.manifest(), old.digest());
                tracing::info!(file, plugin = %info.plugin, version = %info.version, digest = %info.digest, old_digest = %old_info.digest, "plugin replaced; attempts that run finish on the old version");
                self.retire(old);
                self.emit(PluginEvent::Replaced { file, old: old_info, version: info });
            }
            None => {
                tracing::info!(file, plugin = %info.plugin, version = %info.version, digest = %info.digest, contracts = ?info.contracts, "plugin loaded");
                self.emit(PluginEvent::Loaded { file, version: info });
            }
        }
        self.reconsider_taken();
    }

    fn remove(&mut self, file: &str) {
        let Some(state) = self.files.remove(file) else { return };
        if let Some(building) = state.building {
            building.abort.abort();
        }
        self.statuses().remove(file);
        if let Some(old) = state.serving {
            self.publish();
            let version = VersionInfo::of(old.manifest(), old.digest());
            tracing::warn!(file, plugin = %version.plugin, contracts = ?version.contracts, "plugin removed; its contracts are claimed no longer, attempts that run finish");
            self.retire(old);
            self.emit(PluginEvent::Removed { file: file.to_owned(), version });
        }
        self.reconsider_taken();
    }

    fn refuse(&mut self, file: &str, reasons: Vec<Refusal>) {
        self.files.entry(file.to_owned()).or_default();
        let changed = self.set_newest(file, Newest::Refused(reasons.clone()));
        if !changed && reasons.iter().any(|reason| matches!(reason.kind, RefusalKind::Taken | RefusalKind::Directory)) {
            // Judged again because of what is around this file, not because of the file: nothing is new about it.
            return;
        }
        let kept =
            self.files.get(file).and_then(|state| state.serving.as_ref()).map(|kept| VersionInfo::of(kept.manifest(), kept.digest()));
        for reason in &reasons {
            match &kept {
                Some(kept) => tracing::error!(file, kept = %kept.digest, %reason, "plugin refused; the version before it goes on serving"),
                None => tracing::error!(file, %reason, "plugin refused"),
            }
        }
        self.emit(PluginEvent::Refused { file: file.to_owned(), reasons, kept });
    }

    /// What was refused because of another file may serve now.
    fn reconsider_taken(&mut self) {
        self.reconsider_refused(RefusalKind::Taken);
    }

    /// A directory that was missing when its grant was used may be there now, and nothing tells of it.
    fn retry_directories(&mut self) {
        self.reconsider_refused(RefusalKind::Directory);
    }

    fn reconsider_refused(&mut self, kind: RefusalKind) {
        self.reconsider(|newest| matches!(newest, Newest::Refused(reasons) if reasons.iter().any(|reason| reason.kind == kind)));
    }

    fn retry_waiting(&mut self) {
        self.reconsider(|newest| matches!(newest, Newest::Waiting { .. }));
    }

    fn reconsider(&mut self, which: impl Fn(&Newest) -> bool) {
        for (file, state) in &self.files {
            if state.newest.as_ref().is_some_and(&which) {
                self.looks.reconsider(file);
            }
        }
    }

    fn retire(&mut self, version: Arc<PluginVersion>) {
        self.old.retain(|_, versions| versions.iter().any(|version| version.strong_count() > 0));
        self.old.entry(version.name().to_owned()).or_default().push(Arc::downgrade(&version));
    }

    fn publish(&self) {
        self.registry.swap(self.files.values().filter_map(|state| state.serving.clone()));
    }

    fn statuses(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, FileStatus>> {
        // Only whole values are put in, so a poisoned map is still good.
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if nothing changed by it.
    fn set_newest(&mut self, file: &str, newest: Newest) -> bool {
        let Some(state) = self.files.get_mut(file) else { return false };
        let changed = state.newest.as_ref() != Some(&newest);
        state.newest = Some(newest.clone());
        let serving = state.serving.as_ref().map(|serving| VersionInfo::of(serving.manifest(), serving.digest()));
        self.statuses().insert(file.to_owned(), FileStatus { file: file.to_owned(), serving, newest });
        changed
    }

    fn emit(&self, event: PluginEvent) {
        // Nobody has to listen.
        let _ = self.events.send(event);
    }
}
