//! The manifest as values, after everything in it was found acceptable.

use std::collections::BTreeMap;
use std::time::Duration;

use warp_domain::Digest;
use warp_domain::key::KeyTemplate;
use warp_domain::policy::{ConcurrencyKind, Declared, Mode, TimeoutMode};
use warp_domain::resolve::Declarations;

use crate::refusal::{Position, Refusal, Warning};
use crate::text::shown;

/// One plugin's declarations.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// The file that it was read from, as the caller named it.
    pub file: String,
    /// Who it is.
    pub plugin: Plugin,
    /// What a host must be able to enforce; every word is known to this version.
    pub must_understand: Vec<String>,
    /// Job types by name.
    pub contracts: BTreeMap<String, Contract>,
    /// Code by name.
    pub handlers: BTreeMap<String, Handler>,
    /// What it asks of the operator.
    pub capabilities: Capabilities,
    /// What is allowed and yet probably not meant, in the order of the text.
    pub warnings: Vec<Warning>,
    /// Every concurrency key as declared, in the order of the text, for the comparison across plugins.
    pub(crate) keys: Vec<DeclaredKey>,
}

/// One concurrency key as one place declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeclaredKey {
    pub(crate) template: String,
    pub(crate) kind: ConcurrencyKind,
    pub(crate) limit: u32,
    pub(crate) path: String,
    pub(crate) position: Position,
}

impl DeclaredKey {
    pub(crate) const REMEDY: &str = "a key has one pool of slots: declare it alike everywhere, or use two keys";

    /// How this declaration differs from an earlier one of the same key.
    pub(crate) fn disagrees_with(&self, earlier: &DeclaredKey) -> Option<String> {
        if (self.kind, self.limit) == (earlier.kind, earlier.limit) {
            return None;
        }
        let [here, there] = [self, earlier].map(|key| match key.kind {
            ConcurrencyKind::Mutex => "a mutex".to_owned(),
            ConcurrencyKind::Semaphore => format!("a semaphore of {}", key.limit),
        });
        Some(format!("key `{}` is {here} here and {there}", shown(&self.template)))
    }
}

/// Who a plugin is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// The name that grants and commands use.
    pub name: String,
    /// The author's version; shown, never compared.
    pub version: String,
}

/// A job type and the default policy for whatever runs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Contract {
    /// Where it stands.
    pub at: Position,
    /// The families that this version enforces.
    pub declared: Declared,
    /// Rate limit; always absent while [`crate::NOT_YET`] lists it.
    pub rate_limit: Option<RateLimit>,
    /// Circuit breaker; always absent while [`crate::NOT_YET`] lists it.
    pub circuit_breaker: Option<CircuitBreaker>,
    /// Total timeout and its mode; always absent while [`crate::NOT_YET`] lists it.
    pub total_timeout: Option<(Duration, TimeoutMode)>,
}

/// Code that runs one or more contracts.
#[derive(Debug, Clone, PartialEq)]
pub struct Handler {
    /// Where it stands.
    pub at: Position,
    /// The kind of work; [`HandlerKind::Job`] while [`crate::NOT_YET`] lists `kind`.
    pub kind: HandlerKind,
    /// The contracts, at least one, in the order of the text.
    pub handles: Vec<String>,
    /// The families that this version enforces.
    pub declared: Declared,
    /// Rate limit; always absent while [`crate::NOT_YET`] lists it.
    pub rate_limit: Option<RateLimit>,
    /// Circuit breaker; always absent while [`crate::NOT_YET`] lists it.
    pub circuit_breaker: Option<CircuitBreaker>,
}

/// What kind of work a handler does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HandlerKind {
    /// One row, one handler.
    Job,
    /// One event, one child job per handler.
    Message,
    /// Answered at once, without a row; takes no policy.
    Request,
    /// Answered piece by piece, without a row; takes no policy.
    Stream,
    /// State in, state out.
    Saga,
}

impl HandlerKind {
    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HandlerKind::Job => "job",
            HandlerKind::Message => "message",
            HandlerKind::Request => "request",
            HandlerKind::Stream => "stream",
            HandlerKind::Saga => "saga",
        }
    }

    pub(crate) const ALL: [(&'static str, HandlerKind); 5] = [
        ("job", HandlerKind::Job),
        ("message", HandlerKind::Message),
        ("request", HandlerKind::Request),
        ("stream", HandlerKind::Stream),
        ("saga", HandlerKind::Saga),
    ];
}

/// The rate limit family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RateLimit {
    /// What is limited.
    pub key: KeyTemplate,
    /// How many starts each window allows.
    pub count: u32,
    /// The window.
    pub per: Duration,
    /// How it is counted.
    pub style: RateStyle,
    /// What a spent window does to a job.
    pub mode: Mode,
}

/// How a rate is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RateStyle {
    /// Windows aligned to the clock; twice the count may pass across a boundary.
    Fixed,
    /// The last `count` starts are remembered.
    Sliding,
    /// Tokens come back one by one.
    TokenBucket,
}

/// The circuit breaker family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CircuitBreaker {
    /// Jobs that share a breaker; absent: the contract's name.
    pub group: Option<String>,
    /// How many failures in a row open it.
    pub threshold: u32,
    /// How long it stays open.
    pub open: Duration,
    /// By how much longer at most, drawn at random.
    pub reset_jitter: Duration,
}

/// What a plugin asks for. The operator grants it, or the plugin is not loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Directories.
    pub files: Vec<FileAccess>,
    /// Origins such as `https://api.bank.example`; always empty while [`crate::NOT_YET`] lists it.
    pub http: Vec<String>,
    /// Environment variables.
    pub env: Vec<String>,
    /// Buckets of shared state.
    pub state: Vec<Bucket>,
    /// Bytes of linear memory; absent: the host's default.
    pub memory: Option<u64>,
}

/// A directory as the guest names it. The host directory behind it is the operator's choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileAccess {
    /// Relative, with forward slashes.
    pub path: String,
    /// What may be done in it.
    pub mode: FileMode,
}

/// What may be done in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileMode {
    /// Nothing changes.
    Read,
    /// Read, create, change, remove.
    Write,
}

impl FileMode {
    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FileMode::Read => "read",
            FileMode::Write => "write",
        }
    }
}

/// A bucket of shared state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Its name in the job database.
    pub bucket: String,
    /// When writes become visible.
    pub commit: Commit,
    /// Who may write.
    pub write: WriteRule,
}

/// When writes to a bucket become visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Commit {
    /// With the attempt's completion, or not at all.
    Settle,
    /// Each at once.
    Now,
}

impl Commit {
    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Commit::Settle => "settle",
            Commit::Now => "now",
        }
    }
}

/// Who may write to a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteRule {
    /// Every attempt of the plugin.
    Any,
    /// Only an attempt that holds a slot; another one traps.
    UnderMutex,
}

impl WriteRule {
    /// The name in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WriteRule::Any => "any",
            WriteRule::UnderMutex => "under-mutex",
        }
    }
}

impl Manifest {
    /// Reads a manifest. `file_name` is only printed.
    ///
    /// # Errors
    /// Every refusal of the text, in its order. A text that is not TOML, or of another format version, is refused
    /// for that alone, because whatever else it seems to say would be guessed.
    pub fn parse(text: &str, file_name: &str) -> Result<Self, Vec<Refusal>> {
        crate::parse::parse(text, file_name)
    }

    /// What this version of the plugin says about each contract that it handles, in the order of handler names.
    /// A handled contract without a table of its own declares nothing.
    #[must_use]
    pub fn declarations(&self, digest: Digest) -> Vec<Declarations> {
        let of_handler = |(name, handler): (&String, &Handler)| {
            let name = name.clone();
            let on_handler = handler.declared.clone();
            handler
                .handles
                .iter()
                .map(move |contract| Declarations {
                    contract: contract.clone(),
                    handler: name.clone(),
                    digest,
                    on_contract: self.contracts.get(contract).map(|declared| declared.declared.clone()).unwrap_or_default(),
                    on_handler: on_handler.clone(),
                })
                .collect::<Vec<_>>()
        };
        self.handlers.iter().flat_map(of_handler).collect()
    }

    /// The contracts that it handles, each with its handler.
    pub fn handled(&self) -> impl Iterator<Item = (&str, &str)> {
        self.handlers.iter().flat_map(|(name, handler)| handler.handles.iter().map(move |contract| (contract.as_str(), name.as_str())))
    }
}
