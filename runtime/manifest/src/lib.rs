//! The manifest of a plugin: what its author declares, as text that a reviewer reads.
//!
//! What this crate is: the reader of `warp.toml`, the custom section that carries its text inside the component
//! file, the comparison of what a component imports with what a host offers, the comparison of two versions, and
//! the comparison of what is asked with what an operator grants. It is a crate of its own beside the plugin host,
//! so that `check`, `pack` and the developer commands need no engine and no compiler of WebAssembly.
//!
//! What must stay true: nothing is ignored. A key that is unknown, a family that this version cannot enforce, a
//! word in `must_understand` that it does not know: each is refused with file, line and column, the path of the
//! key, what is wrong and what to do. All refusals of a file are reported together. No input makes it panic, and
//! equal bytes always give the same answer.
//!
//! What it deliberately does not do: compile, validate or instantiate a component, read the environment, watch
//! directories, or know a database. It opens a file in one function only, [`check`], which serves the author's CI.

mod across;
mod check;
mod component;
mod diff;
mod grant;
mod imports;
mod load;
mod model;
mod parse;
mod refusal;
mod support;
mod text;

pub use across::{AcrossReport, warnings_across};
pub use check::{Report, check};
pub use component::{ComponentError, Interface, MAX_MANIFEST_BYTES, SECTION, Surface, pack, read, surface};
pub use diff::{Change, diff};
pub use grant::{DEFAULT_MEMORY, Grant, Granted, GrantedDirectory, GrantedFile, check_grant, suggest_grant};
pub use imports::{HostWorld, Offer, check_imports};
pub use load::{Loaded, load};
pub use model::{
    Bucket, Capabilities, CircuitBreaker, Commit, Contract, FileAccess, FileMode, Handler, HandlerKind, Manifest, Plugin, RateLimit,
    RateStyle, WriteRule,
};
pub use refusal::{Location, Position, Refusal, RefusalKind, Warning};
pub use support::{HOST_VERSION, NOT_YET, VOCABULARY};
