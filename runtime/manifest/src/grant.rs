//! What an operator grants, compared with what a manifest asks for.
//!
//! What must stay true: nothing is granted by default but [`DEFAULT_MEMORY`], and what is refused prints the exact
//! block to paste, which keeps everything the operator had already written.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use warp_domain::units::{format_size, parse_size};

use crate::model::{Bucket, FileAccess, FileMode, Manifest};
use crate::refusal::{Location, Refusal, RefusalKind};
use crate::text::{toml_key, toml_string};

/// The bytes of linear memory that every plugin may use unasked. More needs a grant.
pub const DEFAULT_MEMORY: u64 = 64 << 20;

/// `[grant.<plugin>]` of `warp.toml`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Grant {
    /// Directories: the guest's path → the host's.
    pub files: BTreeMap<String, GrantedDirectory>,
    /// Environment variables by name.
    pub env: Vec<String>,
    /// Buckets of shared state by name.
    pub state: Vec<String>,
    /// The most memory, in bytes; written with its unit.
    #[serde(deserialize_with = "size")]
    pub memory: Option<u64>,
}

/// A directory of the host. `in = "/srv/in"` grants what the manifest asks for; `in = { host = "/srv/in", mode =
/// "read" }` grants no more than that, so that a later version of the plugin that asks to write is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedDirectory {
    /// The host's path, relative to `warp.toml` or absolute.
    pub host: String,
    /// The most that may be done in it; absent: whatever is asked.
    pub mode: Option<FileMode>,
}

/// What a plugin gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// Directories, in the order of the manifest.
    pub files: Vec<GrantedFile>,
    /// Environment variables.
    pub env: Vec<String>,
    /// Buckets of shared state, with their rules.
    pub state: Vec<Bucket>,
    /// The most linear memory, in bytes.
    pub memory: u64,
}

/// A directory that a guest sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedFile {
    /// As the guest names it.
    pub path: String,
    /// Where it lies, as the grant wrote it.
    pub host: String,
    /// What may be done in it.
    pub mode: FileMode,
}

/// Gives a plugin what it asks for, if all of it is granted. What is granted and not asked for is not given.
///
/// # Errors
/// One refusal that names everything that is missing and prints the block to paste.
pub fn check_grant(manifest: &Manifest, grant: Option<&Grant>) -> Result<Granted, Box<Refusal>> {
    let none = Grant::default();
    let grant = grant.unwrap_or(&none);
    let asked = &manifest.capabilities;
    let mut lacking: Vec<String> = Vec::new();
    let mut files = Vec::new();
    for FileAccess { path, mode } in &asked.files {
        match grant.files.get(path) {
            Some(GrantedDirectory { host, mode: most }) if most.is_none_or(|most| most == FileMode::Write || *mode == FileMode::Read) => {
                files.push(GrantedFile { path: path.clone(), host: host.clone(), mode: *mode });
            }
            _ => lacking.push(format!("directory `{path}` to {}", mode.name())),
        }
    }
    lacking.extend(asked.env.iter().filter(|name| !grant.env.contains(name)).map(|name| format!("variable `{name}`")));
    let buckets = asked.state.iter().map(|bucket| &bucket.bucket);
    lacking.extend(buckets.filter(|bucket| !grant.state.contains(bucket)).map(|bucket| format!("bucket `{bucket}`")));
    let memory = asked.memory.unwrap_or(DEFAULT_MEMORY);
    if memory > grant.memory.unwrap_or(DEFAULT_MEMORY).max(DEFAULT_MEMORY) {
        lacking.push(format!("{} of memory", format_size(memory)));
    }
    if lacking.is_empty() {
        return Ok(Granted { files, env: asked.env.clone(), state: asked.state.clone(), memory });
    }
    let name = &manifest.plugin.name;
    let location = Location { file: manifest.file.clone(), at: None, key: "capabilities".to_owned() };
    let problem = format!("plugin `{name}` asks for {} and is not granted that", lacking.join(", "));
    let remedy = format!("run `warp-host grant {name}` or write this into warp.toml, and restart the host:\n\n{}", block(manifest, grant));
    Err(Box::new(Refusal { kind: RefusalKind::Grant, location, problem, remedy }))
}

/// The `[grant.<plugin>]` table that grants everything the manifest asks for, with directories beside `warp.toml`.
#[must_use]
pub fn suggest_grant(manifest: &Manifest) -> String {
    block(manifest, &Grant::default())
}

/// The table with what the manifest asks for and what `kept` has already.
fn block(manifest: &Manifest, kept: &Grant) -> String {
    let asked = &manifest.capabilities;
    let mut files = kept.files.clone();
    for FileAccess { path, mode } in &asked.files {
        let most = (*mode == FileMode::Read).then_some(FileMode::Read);
        let entry = files.entry(path.clone()).or_insert_with(|| GrantedDirectory { host: format!("./{path}"), mode: most });
        if *mode == FileMode::Write {
            entry.mode = None;
        }
    }
    let merged = |kept: &[String], asked: Vec<&String>| {
        let mut names = kept.to_vec();
        names.extend(asked.into_iter().filter(|name| !kept.contains(name)).cloned());
        names.iter().map(|name| toml_string(name)).collect::<Vec<_>>().join(", ")
    };
    let env = merged(&kept.env, asked.env.iter().collect());
    let state = merged(&kept.state, asked.state.iter().map(|bucket| &bucket.bucket).collect());
    let memory = kept.memory.max(asked.memory.filter(|bytes| *bytes > DEFAULT_MEMORY));

    let mut out = format!("[grant.{}]\n", toml_key(&manifest.plugin.name));
    if !files.is_empty() {
        let entries: Vec<_> = files.iter().map(|(path, directory)| format!("{} = {directory}", toml_key(path))).collect();
        out.push_str(&format!("files = {{ {} }}\n", entries.join(", ")));
    }
    if !env.is_empty() {
        out.push_str(&format!("env = [{env}]\n"));
    }
    if !state.is_empty() {
        out.push_str(&format!("state = [{state}]\n"));
    }
    if let Some(bytes) = memory {
        out.push_str(&format!("memory = {}\n", toml_string(&format_size(bytes))));
    }
    out
}

impl fmt::Display for GrantedDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = toml_string(&self.host);
        match self.mode {
            None => f.write_str(&host),
            Some(mode) => write!(f, "{{ host = {host}, mode = \"{}\" }}", mode.name()),
        }
    }
}

/// Written by hand, because the derived reader of "text or table" explains neither.
impl<'de> Deserialize<'de> for GrantedDirectory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "lowercase")]
        enum Most {
            Read,
            Write,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Full {
            host: String,
            mode: Most,
        }
        struct TextOrTable;
        impl<'de> Visitor<'de> for TextOrTable {
            type Value = GrantedDirectory;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a directory such as `\"/srv/in\"`, or `{ host = \"/srv/in\", mode = \"read\" }`")
            }
            fn visit_str<E: de::Error>(self, host: &str) -> Result<GrantedDirectory, E> {
                checked(host.to_owned(), None)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<GrantedDirectory, A::Error> {
                let Full { host, mode } = Full::deserialize(MapAccessDeserializer::new(map))?;
                let mode = match mode {
                    Most::Read => FileMode::Read,
                    Most::Write => FileMode::Write,
                };
                checked(host, Some(mode))
            }
        }
        fn checked<E: de::Error>(host: String, mode: Option<FileMode>) -> Result<GrantedDirectory, E> {
            if host.is_empty() || host.contains('\0') {
                return Err(E::custom("a granted directory must not be empty; write its path on this host"));
            }
            Ok(GrantedDirectory { host, mode })
        }
        deserializer.deserialize_any(TextOrTable)
    }
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_size(&text).map(Some).map_err(de::Error::custom)
}
