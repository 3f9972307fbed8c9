//! What a new version of a manifest changes, and what each change means for jobs in flight.
//!
//! It compares what jobs would be stamped with, contract by contract, not the text: a line on a contract that its
//! handler overrides changes nothing, and a reviewer should not be told that it does.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use warp_domain::Digest;
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry, Source, Stamped, Timeout, TimeoutMode};
use warp_domain::resolve::{Declarations, resolve};
use warp_domain::units::{format_duration, format_size};

use crate::model::Manifest;
use crate::text::toml_key;

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path of what changes, such as `handler.call-bank.semaphore.limit`.
    pub path: String,
    /// From what to what.
    pub what: String,
    /// What it means for jobs that have started, are parked, or are still to come.
    pub in_flight: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.path, self.what, self.in_flight)
    }
}

/// Everything that a reload from `old` to `new` changes, by contract, then by capability. Empty when jobs would not
/// notice.
#[must_use]
pub fn diff(old: &Manifest, new: &Manifest) -> Vec<Change> {
    let mut changes = Changes::default();
    if old.plugin.name != new.plugin.name {
        let consequence = format!("the grant of `{}` no longer applies", old.plugin.name);
        changes.add("plugin.name", arrow(&old.plugin.name, &new.plugin.name), consequence);
    }
    if old.plugin.version != new.plugin.version {
        changes.add(
            "plugin.version",
            arrow(&old.plugin.version, &new.plugin.version),
            "runs in progress end on the version they started on",
        );
    }
    let (before, after) = (by_contract(old), by_contract(new));
    let contracts: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for contract in contracts {
        match (before.get(contract), after.get(contract)) {
            (Some(before), Some(after)) => changed_contract(&mut changes, contract, before, after),
            (None, Some(after)) => {
                let what = format!("now run by handler `{}`", after.handler);
                changes.add(contract_path(contract), what, "jobs of it that are waiting for a handler start");
            }
            (Some(before), None) => {
                let what = format!("no longer run by handler `{}`", before.handler);
                let consequence = "runs in progress end; other jobs of it, retries included, wait until some plugin runs it";
                changes.add(contract_path(contract), what, consequence);
            }
            (None, None) => {}
        }
    }
    capabilities(&mut changes, old, new);
    changes.0
}

#[derive(Default)]
struct Changes(Vec<Change>);

impl Changes {
    fn add(&mut self, path: impl Into<String>, what: impl Into<String>, in_flight: impl Into<String>) {
        self.0.push(Change { path: path.into(), what: what.into(), in_flight: in_flight.into() });
    }
}

fn by_contract(manifest: &Manifest) -> BTreeMap<String, Declarations> {
    // The digest only tells sources of different versions apart; here both sides are compared by value.
    manifest.declarations(Digest([0; 32])).into_iter().map(|declarations| (declarations.contract.clone(), declarations)).collect()
}

fn changed_contract(changes: &mut Changes, contract: &str, before: &Declarations, after: &Declarations) {
    if before.handler != after.handler {
        let what = format!("handler `{}` → `{}`", before.handler, after.handler);
        changes.add(contract_path(contract), what, "the next attempt of every job, retries included, runs the new handler");
    }
    let nothing_at_enqueue = Declared::default();
    let (old, new) = (resolve(&nothing_at_enqueue, before), resolve(&nothing_at_enqueue, after));
    concurrency(changes, contract, old.concurrency.as_ref(), new.concurrency.as_ref());
    family(changes, contract, "retry", old.retry.as_ref(), new.retry.as_ref(), retry_text);
    family(changes, contract, "timeout", old.timeout.as_ref(), new.timeout.as_ref(), timeout_text);
}

fn concurrency(changes: &mut Changes, contract: &str, old: Option<&Stamped<Concurrency>>, new: Option<&Stamped<Concurrency>>) {
    let (Some(before), Some(after)) = (old, new) else {
        if let Some(before) = old {
            let consequence =
                format!("jobs that have started or are parked keep {}; those to come run beside them", concurrency_text(&before.value));
            changes.add(path_of(contract, before, word(&before.value)), "removed", consequence);
        }
        if let Some(after) = new {
            let what = format!("added: {}", concurrency_text(&after.value));
            changes.add(path_of(contract, after, word(&after.value)), what, "jobs that have started keep running without a key");
        }
        return;
    };
    let path = path_of(contract, after, word(&after.value));
    let keep = |what: &str| format!("jobs that have started or are parked keep {what}");
    // Destructured without `..`, so that a new field cannot be forgotten here.
    let Concurrency { kind, keys, limit, weight, mode, order, on_retry } = &before.value;
    let new = &after.value;
    if *kind != new.kind {
        changes.add(path.clone(), arrow(word(&before.value), word(new)), keep(&format!("the {}", word(&before.value))));
    }
    if *keys != new.keys {
        let [old_keys, new_keys] =
            [keys, &new.keys].map(|keys| keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(" and "));
        let consequence = format!("{}, and do not exclude jobs of {new_keys}", keep(&old_keys));
        changes.add(format!("{path}.key"), arrow(&old_keys, &new_keys), consequence);
    }
    if *limit != new.limit {
        let consequence = format!("{}; an admin limit would change them", keep(&format!("limit {limit}")));
        changes.add(format!("{path}.limit"), format!("{limit} → {}", new.limit), consequence);
    }
    if *weight != new.weight {
        changes.add(format!("{path}.weight"), format!("{weight} → {}", new.weight), keep(&format!("weight {weight}")));
    }
    for (field, before, after) in [
        ("mode", mode_word(*mode), mode_word(new.mode)),
        ("order", order_word(*order), order_word(new.order)),
        ("on_retry", on_retry_word(*on_retry), on_retry_word(new.on_retry)),
    ] {
        if before != after {
            changes.add(format!("{path}.{field}"), arrow(before, after), keep(before));
        }
    }
}

fn family<T: PartialEq>(
    changes: &mut Changes,
    contract: &str,
    name: &str,
    old: Option<&Stamped<T>>,
    new: Option<&Stamped<T>>,
    text: fn(&T) -> String,
) {
    match (old, new) {
        (Some(before), Some(after)) if before.value != after.value => {
            let keep = text(&before.value);
            changes.add(path_of(contract, after, name), arrow(&keep, &text(&after.value)), format!("jobs that have started keep {keep}"));
        }
        (Some(before), None) => {
            let consequence = format!("jobs that have started keep {}; those to come take the host's default", text(&before.value));
            changes.add(path_of(contract, before, name), "removed", consequence);
        }
        (None, Some(after)) => {
            let what = format!("added: {}", text(&after.value));
            changes.add(path_of(contract, after, name), what, "jobs that have started stay with the host's default");
        }
        _ => {}
    }
}

/// Where the winner of a family stands; on the contract, it is named as such.
fn path_of<T>(contract: &str, winner: &Stamped<T>, family: &str) -> String {
    match &winner.source {
        Source::Handler { name, .. } => format!("handler.{}.{family}", toml_key(name)),
        Source::Contract { .. } | Source::Enqueue => format!("{}.{family}", contract_path(contract)),
    }
}

fn contract_path(contract: &str) -> String {
    format!("contract.{}", toml_key(contract))
}

fn capabilities(changes: &mut Changes, old: &Manifest, new: &Manifest) {
    let (before, after) = (asked(old), asked(new));
    let needs = format!("it does not load until `[grant.{}]` holds that", toml_key(&new.plugin.name));
    for (thing, rule) in &after {
        let (list, name) = thing;
        let path = format!("capabilities.{list}");
        match before.get(thing) {
            None => changes.add(path, format!("now asks for {name}{}", parenthesised(rule)), needs.clone()),
            Some(earlier) if earlier != rule => {
                let consequence = match *list {
                    "files" => "a grant that names a mode has to allow it; runs in progress keep the old one",
                    _ => "runs in progress keep the old rule",
                };
                changes.add(path, format!("{name}: {}", arrow(earlier, rule)), consequence);
            }
            Some(_) => {}
        }
    }
    for ((list, name), _) in before.iter().filter(|(asked, _)| !after.contains_key(*asked)) {
        changes.add(format!("capabilities.{list}"), format!("no longer asks for {name}"), "runs in progress keep it");
    }
    let [was, is] = [old, new].map(|manifest| manifest.capabilities.memory);
    if was != is {
        let [was, is] = [was, is].map(|bytes| bytes.map_or("the default".to_owned(), format_size));
        changes.add("capabilities.memory", arrow(&was, &is), "runs in progress keep the old cap; above the default it needs a grant");
    }
}

type Asked = BTreeMap<(&'static str, String), String>;

/// Everything asked for that has a name, with its rule.
fn asked(manifest: &Manifest) -> BTreeMap<(&'static str, String), String> {
    let asked = &manifest.capabilities;
    let mut all: Asked = BTreeMap::new();
    all.extend(asked.files.iter().map(|file| (("files", format!("`{}`", file.path)), file.mode.name().to_owned())));
    all.extend(asked.http.iter().map(|origin| (("http", format!("`{origin}`")), String::new())));
    all.extend(asked.env.iter().map(|name| (("env", format!("`{name}`")), String::new())));
    let rule = |commit: &str, write: &str| format!("commit {commit}, write {write}");
    let buckets = asked.state.iter();
    all.extend(buckets.map(|bucket| (("state", format!("`{}`", bucket.bucket)), rule(bucket.commit.name(), bucket.write.name()))));
    all
}

fn parenthesised(rule: &str) -> String {
    if rule.is_empty() { String::new() } else { format!(" ({rule})") }
}

fn arrow(before: &str, after: &str) -> String {
    format!("{before} → {after}")
}

fn word(concurrency: &Concurrency) -> &'static str {
    match concurrency.kind {
        ConcurrencyKind::Mutex => "mutex",
        ConcurrencyKind::Semaphore => "semaphore",
    }
}

fn concurrency_text(concurrency: &Concurrency) -> String {
    let keys: Vec<_> = concurrency.keys.iter().map(|key| format!("`{key}`")).collect();
    let limit = match concurrency.kind {
        ConcurrencyKind::Mutex => String::new(),
        ConcurrencyKind::Semaphore => format!(" limit {}", concurrency.limit),
    };
    format!("{} {}{limit} ({})", word(concurrency), keys.join(" and "), mode_word(concurrency.mode))
}

fn retry_text(retry: &Retry) -> String {
    let delays: Vec<_> = retry.delays.iter().map(|delay| format_duration(*delay)).collect();
    format!("max {} after {} with jitter {}", retry.max, delays.join(", "), f64::from(retry.jitter_permille) / 1000.0)
}

fn timeout_text(timeout: &Timeout) -> String {
    let mode = match timeout.mode {
        TimeoutMode::Fail => "fail",
        TimeoutMode::Delete => "delete",
    };
    format!("{} ({mode})", format_duration(timeout.per_attempt))
}

fn mode_word(mode: Mode) -> &'static str {
    match mode {
        Mode::Skip => "skip",
        Mode::Wait => "wait",
    }
}

fn order_word(order: Order) -> &'static str {
    match order {
        Order::Any => "any",
        Order::Fifo => "fifo",
    }
}

fn on_retry_word(on_retry: OnRetry) -> &'static str {
    match on_retry {
        OnRetry::Block => "block",
        OnRetry::Pass => "pass",
    }
}
