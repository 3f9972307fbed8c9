//! From text to [`Manifest`]: the shape of format 1.

mod capabilities;
mod policy;
mod reader;

use std::collections::BTreeMap;

use toml::de::DeTable;

use self::policy::{FAMILIES, Families, Place};
use self::reader::{Node, Reader, View};
use crate::component::MAX_MANIFEST_BYTES;
use crate::model::{Capabilities, Contract, DeclaredKey, Handler, HandlerKind, Manifest, Plugin};
use crate::refusal::{Refusal, RefusalKind};
use crate::support::{HOST_VERSION, NOT_YET, VOCABULARY, enforced};
use crate::text::{nearest, shown, toml_key};

/// The only format version that this host reads.
const FORMAT: u32 = 1;
/// As many bytes as the store keeps of a name.
const LONGEST_NAME: usize = 200;
/// More contracts than this in one handler are a list that nobody reviews.
const MOST_HANDLED: usize = 256;
const TABLES: [&str; 5] = ["format", "plugin", "contract", "handler", "capabilities"];
const HANDLER_KEYS: [&str; 8] = ["handles", "kind", "mutex", "semaphore", "rate_limit", "retry", "timeout", "circuit_breaker"];

pub(crate) fn parse(text: &str, file: &str) -> Result<Manifest, Vec<Refusal>> {
    if text.len() > MAX_MANIFEST_BYTES {
        let mut reader = Reader::new("", file);
        let problem = format!("the manifest has {} bytes", text.len());
        reader.refuse(RefusalKind::Manifest, None, "", problem, format!("keep it within {MAX_MANIFEST_BYTES} bytes"));
        return Err(reader.finish().0);
    }
    let (root, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader::new(text, file);
    // What a text seems to say behind its first error is a guess, so nothing else in it is judged, further errors
    // included: one bracket too many makes dozens of them.
    if let Some(error) = errors.iter().min_by_key(|error| error.span().map(|span| span.start)) {
        let at = error.span().map(|span| span.start);
        let problem = format!("not TOML: {}", shown(error.message()));
        reader.refuse(RefusalKind::Manifest, at, "", problem, "correct the text; the rest is judged when it is TOML");
        return Err(reader.finish().0);
    }
    let manifest = document(&mut reader, &View::root(root.get_ref()), file);
    match (manifest, reader.finish()) {
        (Some(manifest), (refusals, warnings)) if refusals.is_empty() => Ok(Manifest { warnings, ..manifest }),
        (_, (refusals, _)) => Err(refusals),
    }
}

/// The whole file. `None` only beside at least one refusal.
fn document<'t>(reader: &mut Reader<'t>, root: &View<'t>, file: &str) -> Option<Manifest> {
    format(reader, root)?;
    reader.only(root, &TABLES);
    let plugin = plugin(reader, root);
    let mut keys = Vec::new();
    let contracts = contracts(reader, root, &mut keys);
    let handlers = handlers(reader, root, &mut keys);
    cross_check(reader, &contracts, &handlers);
    compare_keys(reader, &mut keys);
    let capabilities = match root.get("capabilities") {
        Some(node) => reader.table(&node).map(|table| capabilities::capabilities(reader, &table)),
        None => Some(Capabilities::default()),
    };
    let (plugin, must_understand) = plugin?;
    Some(Manifest {
        file: file.to_owned(),
        plugin,
        must_understand,
        contracts: contracts.into_iter().map(|(name, (_, contract))| (name, contract)).collect(),
        handlers: handlers.into_iter().map(|(name, (_, handler))| (name, handler)).collect(),
        capabilities: capabilities?,
        warnings: Vec::new(),
        keys: keys.into_iter().map(|key| key.declared).collect(),
    })
}

/// Another format may mean other things by the same keys, so nothing else is judged when this fails.
fn format<'t>(reader: &mut Reader<'t>, root: &View<'t>) -> Option<u32> {
    let Some(node) = root.get("format") else {
        if is_of_something_else(root) {
            let problem = "it has neither `format` nor `[plugin]`: it looks like the settings of a host, and is no manifest";
            let remedy = "name a plugin's manifest; that has `format` and a `[plugin]` table";
            reader.refuse(RefusalKind::Manifest, None, "", problem, remedy);
            return None;
        }
        reader.missing(root, "format", format!("write `format = {FORMAT}` as the first line"));
        return None;
    };
    let format = reader.whole(&node, 0..=u32::MAX)?;
    if format != FORMAT {
        let problem = format!("format {format} is not known to this version (warp-host {HOST_VERSION}), which reads format {FORMAT}");
        reader.refuse(RefusalKind::NotSupported, Some(node.span.start), "format", problem, "load it into a newer host, or write format 1");
        return None;
    }
    Some(format)
}

/// Whether a text has keys and none that a manifest has. The host's own settings may have the same file name.
fn is_of_something_else(root: &View<'_>) -> bool {
    let entries = root.entries();
    !entries.is_empty() && entries.iter().all(|(key, _)| !TABLES.contains(key))
}

fn plugin<'t>(reader: &mut Reader<'t>, root: &View<'t>) -> Option<(Plugin, Vec<String>)> {
    let Some(node) = root.get("plugin") else {
        reader.missing(root, "plugin", "write `[plugin]` with `name` and `version`");
        return None;
    };
    let view = reader.table(&node)?;
    reader.only(&view, &["name", "version", "must_understand"]);
    let name = match view.get("name") {
        Some(node) => reader.text(&node).filter(|text| plugin_name_is_good(reader, &node, text)),
        None => {
            reader.missing(&view, "name", "write the name that grants and commands use, such as `name = \"payments\"`");
            None
        }
    };
    let version = match view.get("version") {
        Some(node) => reader.text(&node).filter(|text| version_is_good(reader, &node, text)),
        None => {
            reader.missing(&view, "version", "write the author's version, such as `version = \"1.0.0\"`");
            None
        }
    };
    let must_understand = view.get("must_understand").map(|node| must_understand(reader, &node)).unwrap_or_default();
    Some((Plugin { name: name?.to_owned(), version: version?.to_owned() }, must_understand))
}

fn plugin_name_is_good(reader: &mut Reader<'_>, node: &Node<'_>, text: &str) -> bool {
    let good = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && text.len() <= 64
        && text.bytes().next().is_some_and(|first| first.is_ascii_lowercase());
    if !good {
        let remedy = "write up to 64 lower-case letters, digits and `-`, beginning with a letter, such as `payments`";
        reader.wrong(node, format!("`{}` is not the name of a plugin", shown(text)), remedy);
    }
    good
}

fn version_is_good(reader: &mut Reader<'_>, node: &Node<'_>, text: &str) -> bool {
    let good = text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'+' | b'_'))
        && text.len() <= 64
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric());
    if !good {
        reader.wrong(node, format!("`{}` is not a version", shown(text)), "write something like `1.4.0` or `2026-08-21`");
    }
    good
}

fn must_understand<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<String> {
    let mut understood = Vec::new();
    for (node, word) in reader.texts(node).unwrap_or_default() {
        if enforced(word) {
            understood.push(word.to_owned());
        } else if NOT_YET.contains(&word) {
            reader.not_supported(&node, &format!("`{word}`"));
        } else {
            let problem = format!("`{}` is not known to this version (warp-host {HOST_VERSION})", shown(word));
            let remedy = match nearest(word, VOCABULARY) {
                Some(near) => format!("did you mean `{near}`? otherwise load the plugin into a newer host"),
                None => "load the plugin into a newer host".to_owned(),
            };
            reader.refuse(RefusalKind::NotSupported, Some(node.span.start), &node.path, problem, remedy);
        }
    }
    understood
}

/// What is declared on a concurrency key and where, for the comparison within a file and across files.
struct PlacedKey {
    at: usize,
    declared: DeclaredKey,
}

type Placed<T> = BTreeMap<String, (PlaceOf, T)>;

fn contracts<'t>(reader: &mut Reader<'t>, root: &View<'t>, keys: &mut Vec<PlacedKey>) -> Placed<Contract> {
    let mut contracts = BTreeMap::new();
    for (name, table, at) in named_tables(reader, root, "contract") {
        reader.only(&table, &FAMILIES);
        let read = policy::families(reader, &table, Place::Contract);
        remember_keys(reader, &read, keys);
        let Families { declared, rate_limit, circuit_breaker, total_timeout, concurrency_at: _ } = read;
        let place = PlaceOf { at, path: table.path.clone(), handles: Vec::new() };
        let contract = Contract { at: reader.position(at), declared, rate_limit, circuit_breaker, total_timeout };
        contracts.insert(name.to_owned(), (place, contract));
    }
    contracts
}

fn handlers<'t>(reader: &mut Reader<'t>, root: &View<'t>, keys: &mut Vec<PlacedKey>) -> Placed<Handler> {
    let mut handlers = BTreeMap::new();
    for (name, table, at) in named_tables(reader, root, "handler") {
        reader.only(&table, &HANDLER_KEYS);
        let kind = kind(reader, &table);
        let read = policy::families(reader, &table, Place::Handler);
        remember_keys(reader, &read, keys);
        let handles = handles(reader, &table, name, at);
        let Families { declared, rate_limit, circuit_breaker, total_timeout: _, concurrency_at: _ } = read;
        let handler = Handler {
            at: reader.position(at),
            kind,
            handles: handles.iter().map(|(contract, _, _)| contract.clone()).collect(),
            declared,
            rate_limit,
            circuit_breaker,
        };
        handlers.insert(name.to_owned(), (PlaceOf { at, path: table.path.clone(), handles }, handler));
    }
    let no_table = root.get("handler").is_none_or(|node| node.value.as_table().is_some_and(DeTable::is_empty));
    if no_table {
        reader.missing(root, "handler", "write `[handler.<name>]`, named like the contract that it runs");
    }
    handlers
}

/// The tables `[what.<name>]` whose names are good, in the order of the text.
fn named_tables<'t>(reader: &mut Reader<'t>, root: &View<'t>, what: &str) -> Vec<(&'t str, View<'t>, usize)> {
    let Some(node) = root.get(what) else { return Vec::new() };
    let Some(view) = reader.table(&node) else { return Vec::new() };
    let mut tables = Vec::new();
    for (name, node) in view.entries() {
        let Some(table) = reader.table(&node) else { continue };
        if name_is_good(name) {
            tables.push((name, table, node.span.start));
        } else {
            refuse_name(reader, &node, name);
        }
    }
    tables
}

/// A name of a contract, handler or group.
fn name<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Option<&'t str> {
    let text = reader.text(node)?;
    if !name_is_good(text) {
        refuse_name(reader, node, text);
        return None;
    }
    Some(text)
}

fn name_is_good(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/'))
        && text.len() <= LONGEST_NAME
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

fn refuse_name(reader: &mut Reader<'_>, node: &Node<'_>, text: &str) {
    let remedy = format!("write up to {LONGEST_NAME} letters, digits, `-`, `_`, `.`, `:` and `/`, beginning with a letter or digit");
    reader.wrong(node, format!("`{}` is not a name", shown(text)), remedy);
}

fn kind<'t>(reader: &mut Reader<'t>, table: &View<'t>) -> HandlerKind {
    let Some(node) = table.get("kind") else { return HandlerKind::Job };
    let Some(kind) = reader.choice(&node, &HandlerKind::ALL) else { return HandlerKind::Job };
    if kind != HandlerKind::Job && !enforced("kind") {
        reader.not_supported(&node, &format!("kind `{}`", kind.name()));
    }
    if matches!(kind, HandlerKind::Request | HandlerKind::Stream) {
        for (_, family) in table.entries().into_iter().filter(|(key, _)| FAMILIES.contains(key)) {
            let problem = format!("a {} is answered at once and has no row that could carry a policy", kind.name());
            reader.wrong(&family, problem, "remove it, or make the handler one of kind `job`");
        }
    }
    kind
}

/// The contracts of a handler, each with the path and place that names it.
type Handled = Vec<(String, String, usize)>;

fn handles<'t>(reader: &mut Reader<'t>, table: &View<'t>, own_name: &str, at: usize) -> Handled {
    let Some(node) = table.get("handles") else { return vec![(own_name.to_owned(), table.path.clone(), at)] };
    let Some(items) = reader.texts(&node) else { return Vec::new() };
    if items.is_empty() || items.len() > MOST_HANDLED {
        let remedy = format!("write 1 to {MOST_HANDLED} contracts, or remove `handles` to run `{own_name}`");
        reader.wrong(&node, format!("{} contracts", items.len()), remedy);
        return Vec::new();
    }
    let mut handles: Handled = Vec::new();
    for (item, _) in items {
        let Some(contract) = name(reader, &item) else { continue };
        if handles.iter().any(|(earlier, _, _)| earlier == contract) {
            reader.wrong(&item, format!("contract `{contract}` stands here twice"), "remove one");
        } else {
            handles.push((contract.to_owned(), item.path.clone(), item.span.start));
        }
    }
    handles
}

/// What contracts and handlers say about each other.
fn cross_check(reader: &mut Reader<'_>, contracts: &Placed<Contract>, handlers: &Placed<Handler>) {
    let mut by_place: Vec<_> = handlers.iter().collect();
    by_place.sort_by_key(|(_, (place, _))| place.at);
    let mut handler_of: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, (place, handler)) in by_place {
        for (contract, path, at) in &place.handles {
            if !contracts.contains_key(contract) && contract != name {
                let remedy = format!("write `[contract.{}]`, or correct the name", toml_key(contract));
                reader.warn(*at, path, format!("nobody declares contract `{contract}`"), remedy);
            }
            if handler.kind == HandlerKind::Message {
                handler_of.entry(contract).or_insert(name);
            } else if let Some(earlier) = handler_of.insert(contract, name) {
                let problem = format!("contract `{contract}` is run by handler `{earlier}` already");
                reader.refuse(RefusalKind::Manifest, Some(*at), path, problem, "a job has one handler: remove one of the two");
            }
        }
    }
    for (name, (place, _)) in contracts {
        if !handler_of.contains_key(name.as_str()) {
            let remedy = format!("write `[handler.{}]`, or name it in some handler's `handles`", toml_key(name));
            reader.warn(place.at, &place.path, "no handler of this plugin runs this contract", remedy);
        }
    }
}

fn remember_keys(reader: &Reader<'_>, read: &Families, keys: &mut Vec<PlacedKey>) {
    let (Some(concurrency), Some((span, path))) = (&read.declared.concurrency, &read.concurrency_at) else { return };
    for template in &concurrency.keys {
        let declared = DeclaredKey {
            template: template.to_string(),
            kind: concurrency.kind,
            limit: concurrency.limit,
            path: path.clone(),
            position: reader.position(span.start),
        };
        keys.push(PlacedKey { at: span.start, declared });
    }
}

/// The same key with two kinds or two limits: a key has one pool of slots, so one of the two surprises somebody.
fn compare_keys(reader: &mut Reader<'_>, keys: &mut [PlacedKey]) {
    keys.sort_by_key(|key| key.at);
    let mut first_of: BTreeMap<&str, &DeclaredKey> = BTreeMap::new();
    for PlacedKey { at, declared } in keys.iter() {
        let first = *first_of.entry(&declared.template).or_insert(declared);
        if let Some(problem) = declared.disagrees_with(first) {
            reader.warn(*at, &declared.path, format!("{problem} at {}", first.path), DeclaredKey::REMEDY);
        }
    }
}

/// Where a contract or handler stands, and what the handler names.
struct PlaceOf {
    at: usize,
    path: String,
    handles: Handled,
}
