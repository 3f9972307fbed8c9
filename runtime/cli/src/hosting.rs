//! Wiring of a host: runtimes, engine, plugins, and the catalog that the host loop claims for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Mutex, watch};
use warp_pipeline::Handler;
use warp_plugin_host::{Cache, Caps, CodeLoader, Engine, EngineConfig, Grants, Loader, Registry};
use warp_worker::{Catalog, Offer};

use crate::config::Config;
use crate::failure::{Failure, Outcome};

/// The largest component that is loaded. Python ones have 18 to 24 MB.
const MAX_COMPONENT_BYTES: u64 = 128 << 20;
/// How long one compilation may take before it is refused.
const COMPILE_LIMIT: Duration = Duration::from_secs(120);
/// Places in the engine beyond the workers, for runs that are still being stopped.
const ENGINE_MARGIN: u32 = 8;

/// The runtime of everything that must not wait for a guest: one thread, the caller's.
pub fn control_runtime() -> Outcome<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// The runtime of the guests: a thread for each core.
pub fn guest_runtime() -> Outcome<Runtime> {
    Ok(Builder::new_multi_thread().thread_name("warp-guest").enable_all().build()?)
}

/// Engine, cache and loader for this many workers. A cache that cannot be used costs start-up time, nothing else.
pub fn loader(workers: u32, cache: &Path) -> Outcome<Arc<Loader>> {
    let config = EngineConfig { slots: workers.saturating_add(ENGINE_MARGIN), ..EngineConfig::default() };
    let engine = Engine::new(&config).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
    let cache = match Cache::open(cache, &engine) {
        Ok(cache) => Some(cache),
        Err(error) => {
            tracing::warn!(cache = %cache.display(), %error, "the cache of compiled code cannot be used; every plugin is compiled at each start");
            None
        }
    };
    let code = CodeLoader::new(Arc::clone(&engine), cache, COMPILE_LIMIT).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
    Ok(Arc::new(Loader::new(engine, code, Caps::default(), MAX_COMPONENT_BYTES)))
}

/// What the settings grant, with the values of the environment that any grant names.
pub fn grants(config: &Config) -> Grants {
    let plugins: std::collections::BTreeMap<_, _> = config.grants.iter().map(|(name, (grant, _))| (name.clone(), grant.clone())).collect();
    let named = plugins.values().flat_map(|grant| grant.env.iter());
    let env = named.filter_map(|name| std::env::var(name).ok().map(|value| (name.clone(), value))).collect();
    Grants { plugins, base: beside_settings(config), env }
}

/// What relative directories of grants are relative to.
pub fn beside_settings(config: &Config) -> PathBuf {
    config.file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// The plugins directory as the host loop sees it.
pub struct DirectoryCatalog {
    registry: Arc<Registry>,
    swaps: Mutex<watch::Receiver<u64>>,
}

impl DirectoryCatalog {
    /// Over what serves now and later.
    pub fn new(registry: Arc<Registry>) -> Self {
        let swaps = Mutex::new(registry.subscribe());
        DirectoryCatalog { registry, swaps }
    }
}

#[async_trait]
impl Catalog for DirectoryCatalog {
    fn offers(&self) -> Vec<Offer> {
        let snapshot = self.registry.snapshot();
        let offer = |served: &warp_plugin_host::Served| Offer {
            declarations: Arc::clone(&served.declarations),
            handler: Arc::<warp_plugin_host::PluginVersion>::clone(&served.version) as Arc<dyn Handler>,
        };
        snapshot.contracts().values().map(offer).collect()
    }

    async fn changed(&self) {
        // The registry outlives its directory; when both are gone nothing changes any more.
        if self.swaps.lock().await.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn refused(refusals: &[warp_manifest::Refusal]) -> Failure {
    let lines: Vec<_> = refusals.iter().map(ToString::to_string).collect();
    Failure::usage(lines.join("\n"))
}

/// Loads one plugin outside a directory, for measurements.
pub fn load_one(runtime: &Runtime, loader: &Loader, file: &Path, grants: &Grants) -> Outcome<Arc<dyn Handler>> {
    let version = runtime.block_on(loader.load_file(file, grants)).map_err(|refusals| refused(&refusals))?;
    Ok(version)
}
