//! The host's side of the WIT package, one file per interface.
//!
//! What must stay true: a call checks its own arguments here, before anybody else sees them, and every call with
//! an effect goes through [`warp_pipeline::HostCalls`], which knows whether the run may still have effects.
//!
//! What it deliberately does not do: decide what a child or a state write means. It knows no database.

mod cancellation;
mod jobs;
mod log;
mod progress;
mod state;

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use warp_pipeline::{AttemptInfo, HostCalls, Level};
use wasmtime::component::{HasSelf, Linker, ResourceTable};
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};

use crate::limits::{Caps, Limiter, Refused};
use crate::output::{GuestStream, Output};
use crate::permissions::Permissions;

pub(crate) mod bindings {
    wasmtime::component::bindgen!({
        world: "stateful-handler",
        path: "../../wit/warp-job@1.0.0",
        imports: {
            "warp:job/state": async | trappable,
            default: trappable,
        },
        exports: { default: async },
    });
}

pub(crate) use bindings::StatefulHandlerPre;
use bindings::warp::job::types;

/// What one attempt's store holds: everything that the guest can reach, and nothing of another attempt.
pub(crate) struct HostState {
    pub(crate) limiter: Limiter,
    calls: Arc<dyn HostCalls>,
    output: Arc<Output>,
    permissions: Arc<Permissions>,
    caps: Arc<Caps>,
    home: Option<Home>,
    wasi: WasiCtx,
    table: ResourceTable,
}

/// What [`HostState::new`] needs.
pub(crate) struct HostParams {
    pub(crate) calls: Arc<dyn HostCalls>,
    pub(crate) output: Arc<Output>,
    pub(crate) permissions: Arc<Permissions>,
    pub(crate) caps: Arc<Caps>,
    pub(crate) home: Option<Home>,
}

/// Where host calls that use the network run, if the guest itself runs on a runtime that ends with it: a database
/// connection opened there would die with it.
#[derive(Clone)]
pub(crate) struct Home {
    pub(crate) runtime: Handle,
    /// Held by every call until it is over, so that the run can wait until all are.
    pub(crate) open: mpsc::Sender<()>,
}

impl HostState {
    /// # Errors
    /// When a granted directory cannot be opened.
    pub(crate) fn new(params: HostParams) -> Result<Self, String> {
        let HostParams { calls, output, permissions, caps, home } = params;
        let mut wasi = WasiCtxBuilder::new();
        // No arguments, no standard input, no network: what is not named here is absent or denied.
        wasi.allow_tcp(false)
            .allow_udp(false)
            .allow_ip_name_lookup(false)
            .max_random_size(caps.random_bytes)
            .stdout(GuestStream { output: Arc::clone(&output), level: Level::Stdout })
            .stderr(GuestStream { output: Arc::clone(&output), level: Level::Stderr })
            // File calls run on the guest's own thread, which is one that may block (see runner.rs).
            .allow_blocking_current_thread(true);
        for (name, value) in &permissions.env {
            wasi.env(name, value);
        }
        for file in &permissions.files {
            let perms = if file.writable { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
            wasi.preopened_dir(&file.host, &file.guest, perms)
                .map_err(|e| format!("failed to open {}, granted as {}: {e:#}", file.host.display(), file.guest))?;
        }
        let mut table = ResourceTable::new();
        table.set_max_capacity(caps.resources);
        Ok(HostState { limiter: Limiter::new(&caps), calls, output, permissions, caps, home, wasi: wasi.build(), table })
    }
}

impl WasiView for HostState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

// The interface has types and no functions.
impl types::Host for HostState {}

/// Everything that a component may import from this host.
pub(crate) fn linker(engine: &wasmtime::Engine) -> wasmtime::Result<Linker<HostState>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    bindings::StatefulHandler::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    Ok(linker)
}

/// An attempt as the guest sees it.
pub(crate) fn attempt(info: &AttemptInfo) -> types::Attempt {
    types::Attempt {
        job_id: info.job_id.to_string(),
        contract: info.contract.clone(),
        handler: info.handler.clone(),
        payload: info.payload.to_string(),
        run: info.run,
        attempt: info.attempt,
        queue: info.queue.clone(),
        metadata: info.metadata.clone(),
        trace_parent: info.trace_parent.clone(),
        time_left: info.time_left.map(|left| u32::try_from(left.as_millis()).unwrap_or(u32::MAX)),
        fencing_token: info.fencing_token.clone(),
    }
}

/// Refuses a text that PostgreSQL cannot keep. It traps, because the interfaces have no word for it and a guest
/// that does this has a defect.
fn no_nul(what: &str, text: &str) -> wasmtime::Result<()> {
    match text.find('\0') {
        None => Ok(()),
        Some(at) => Err(wasmtime::Error::new(Refused::Nul { what: what.to_owned(), at })),
    }
}
