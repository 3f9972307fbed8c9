//! From bytes to a compiled component: the cache if it has it, else the compile thread.
//!
//! What must stay true: the engine sees only bytes whose digest is the one that the result is kept under.
//!
//! What it deliberately does not do: read files, or decide whether the component may run.

use std::sync::Arc;
use std::time::Duration;

use warp_domain::Digest;
use wasmtime::component::Component;

use crate::compiler::Compiler;
use crate::{Cache, Engine, PluginHostError};

/// Compiles and remembers.
pub struct CodeLoader {
    engine: Arc<Engine>,
    cache: Option<Arc<Cache>>,
    compiler: Compiler,
}

impl CodeLoader {
    /// Starts the compile thread. `limit` is how long one compilation may take before it is refused.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(engine: Arc<Engine>, cache: Option<Cache>, limit: Duration) -> Result<Self, PluginHostError> {
        Ok(CodeLoader { engine, cache: cache.map(Arc::new), compiler: Compiler::new(limit)? })
    }

    /// Whether [`CodeLoader::component`] will answer without compiling, and the component if so.
    pub async fn cached(&self, code: Digest) -> Option<Component> {
        let cache = Arc::clone(self.cache.as_ref()?);
        let engine = Arc::clone(&self.engine);
        // Reading some megabytes and hashing them is no work for a thread that others wait for.
        tokio::task::spawn_blocking(move || cache.load(engine.raw(), code)).await.ok()?
    }

    /// The component of these bytes; `code` is their digest.
    ///
    /// # Errors
    /// When they are no component, or compiling takes too long.
    pub async fn component(&self, bytes: Arc<[u8]>, code: Digest) -> Result<Component, PluginHostError> {
        if let Some(component) = self.cached(code).await {
            return Ok(component);
        }
        let engine = Arc::clone(&self.engine);
        let cache = self.cache.clone();
        let size = bytes.len() as u64;
        self.compiler.run(size, move || compile(&engine, cache.as_deref(), &bytes, code)).await
    }
}

fn compile(engine: &Engine, cache: Option<&Cache>, bytes: &[u8], code: Digest) -> Result<Component, PluginHostError> {
    let refuse = |e: wasmtime::Error| PluginHostError::Compile(format!("{e:#}"));
    let compiled = engine.raw().precompile_component(bytes).map_err(refuse)?;
    if let Some(cache) = cache {
        match cache.keep(code, &compiled) {
            // Mapped from the file, its pages are shared and can be given back to the system.
            Ok(()) => {
                if let Some(component) = cache.load(engine.raw(), code) {
                    return Ok(component);
                }
            }
            Err(e) => tracing::warn!(error = %e, "failed to keep compiled code; it will be compiled again at the next start"),
        }
    }
    // SAFETY: this engine has just made these bytes.
    unsafe { Component::deserialize(engine.raw(), &compiled) }.map_err(refuse)
}
