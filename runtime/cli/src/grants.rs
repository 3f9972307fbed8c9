//! `[grant.<plugin>]` of `warp.toml`: reading the tables, and adding one without touching the rest of the file.
//!
//! What must stay true: writing keeps every comment, every other table and everything already granted; it only
//! adds what the manifest asks for.

use std::collections::BTreeMap;

use serde::Deserialize;
use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, Value};
use warp_domain::units::{format_size, parse_size};
use warp_manifest::{DEFAULT_MEMORY, FileMode, Grant, Manifest};

/// Every grant in the text of a `warp.toml`.
///
/// # Errors
/// The byte where it is wrong, and why.
pub fn read(text: &str) -> Result<BTreeMap<String, Grant>, (usize, String)> {
    /// The other keys are read, and refused, by [`crate::config`].
    #[derive(Deserialize)]
    struct OnlyGrants {
        #[serde(default)]
        grant: BTreeMap<String, Grant>,
    }
    let failed = |error: toml::de::Error| (error.span().map_or(0, |span| span.start), error.message().to_owned());
    toml::from_str::<OnlyGrants>(text).map(|file| file.grant).map_err(failed)
}

/// A grant on one line.
pub fn in_words(grant: &Grant) -> String {
    let Grant { files, env, state, memory } = grant;
    let mut words: Vec<String> = files
        .iter()
        .map(|(path, directory)| {
            let mode = directory.mode.map_or("as asked", FileMode::name);
            format!("directory {path} = {} ({mode})", directory.host)
        })
        .collect();
    words.extend(env.iter().map(|name| format!("variable {name}")));
    words.extend(state.iter().map(|name| format!("bucket {name}")));
    words.extend(memory.map(|bytes| format!("{} of memory", format_size(bytes))));
    if words.is_empty() { "nothing".to_owned() } else { words.join(", ") }
}

/// What [`add`] made of a file.
pub struct Added {
    /// The new text of the file.
    pub text: String,
    /// The table alone.
    pub table: String,
    /// What is granted now and was not before, one line each.
    pub changes: Vec<String>,
}

/// Adds to `text` what `manifest` asks for; `dirs` are the host's directories for some of the names it asks for.
///
/// # Errors
/// A text that is not TOML, a table that is none, or a directory that the manifest does not ask for.
pub fn add(text: &str, manifest: &Manifest, dirs: &BTreeMap<String, String>) -> Result<Added, String> {
    let name = &manifest.plugin.name;
    let asked = &manifest.capabilities;
    if let Some(unasked) = dirs.keys().find(|dir| asked.files.iter().all(|file| file.path != **dir)) {
        let names: Vec<_> = asked.files.iter().map(|file| file.path.as_str()).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(format!("`{name}` asks for no directory `{unasked}`; it asks for {names}"));
    }
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| error.to_string())?;
    let grants = document.entry("grant").or_insert_with(|| {
        let mut table = Table::new();
        // Only `[grant.<plugin>]` is written, no empty `[grant]` above it.
        table.set_implicit(true);
        Item::Table(table)
    });
    let grants = grants.as_table_like_mut().ok_or("`grant` is not a table")?;
    let table = grants.entry(name).or_insert_with(|| Item::Table(Table::new()));
    let table = table.as_table_like_mut().ok_or_else(|| format!("`grant.{name}` is not a table"))?;
    let mut changes = Vec::new();

    if !asked.files.is_empty() {
        let files = table.entry("files").or_insert_with(|| Item::Value(Value::InlineTable(InlineTable::new())));
        let files = files.as_table_like_mut().ok_or_else(|| format!("`grant.{name}.files` is not a table"))?;
        for file in &asked.files {
            let (host_now, mode_now) = match files.get(&file.path) {
                Some(Item::Value(Value::String(host))) => (Some(host.value().clone()), None),
                Some(item) => {
                    let field = |key| item.as_table_like().and_then(|table| table.get(key)).and_then(Item::as_str).map(str::to_owned);
                    (field("host"), field("mode"))
                }
                None => (None, None),
            };
            let host = dirs.get(&file.path).cloned().or(host_now.clone()).unwrap_or_else(|| format!("./{}", file.path));
            // A grant of reading stops a later version that asks to write; writing is granted as it is asked for.
            let mode = match (file.mode, &host_now, mode_now.as_deref()) {
                (FileMode::Read, None, _) => Some("read"),
                (FileMode::Read, Some(_), mode) => mode,
                (FileMode::Write, _, _) => None,
            };
            if host_now.as_ref() == Some(&host) && mode == mode_now.as_deref() {
                continue;
            }
            if host_now.as_ref() == Some(&host) && file.mode == FileMode::Write && mode_now.as_deref() == Some("write") {
                continue;
            }
            let value = match mode {
                None => Value::from(host.as_str()),
                Some(mode) => Value::InlineTable(InlineTable::from_iter([("host", host.as_str()), ("mode", mode)])),
            };
            put(files, &file.path, value);
            changes.push(format!("directory `{}` is {host}, to {}", file.path, file.mode.name()));
        }
    }
    let buckets: Vec<_> = asked.state.iter().map(|bucket| &bucket.bucket).collect();
    for (key, what, names) in [("env", "variable", asked.env.iter().collect::<Vec<_>>()), ("state", "bucket", buckets)] {
        if names.is_empty() {
            continue;
        }
        let list = table.entry(key).or_insert_with(|| Item::Value(Value::Array(Array::new())));
        let list = list.as_array_mut().ok_or_else(|| format!("`grant.{name}.{key}` is not a list"))?;
        for wanted in names {
            if !list.iter().any(|item| item.as_str() == Some(wanted)) {
                list.push(wanted.as_str());
                changes.push(format!("{what} `{wanted}`"));
            }
        }
    }
    if let Some(bytes) = asked.memory.filter(|bytes| *bytes > DEFAULT_MEMORY) {
        let granted = table.get("memory").and_then(Item::as_str).and_then(|text| parse_size(text).ok()).unwrap_or(0);
        if granted < bytes {
            put(table, "memory", Value::from(format_size(bytes)));
            changes.push(format!("{} of memory", format_size(bytes)));
        }
    }
    let text = document.to_string();
    let table = block(&document, name);
    // What was written must be what is read: an existing table may hold something that is no grant.
    read(&text).map_err(|(_, why)| format!("the table would not be a grant: {why}"))?;
    Ok(Added { text, table, changes })
}

/// Replaces a value and keeps the comment behind it.
fn put(table: &mut dyn toml_edit::TableLike, key: &str, mut value: Value) {
    if let Some(Item::Value(old)) = table.get(key) {
        *value.decor_mut() = old.decor().clone();
    }
    table.insert(key, Item::Value(value));
}

/// One plugin's table as a text of its own.
fn block(document: &DocumentMut, name: &str) -> String {
    let Some(item) = document.get("grant").and_then(|grants| grants.get(name)) else {
        return String::new();
    };
    let mut grants = Table::new();
    grants.set_implicit(true);
    let mut item = item.clone();
    if let Some(table) = item.as_table_mut() {
        table.decor_mut().clear();
    }
    grants.insert(name, item);
    let mut alone = DocumentMut::new();
    alone.insert("grant", Item::Table(grants));
    alone.to_string().trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKS: &str = r#"
format = 1
[plugin]
name = "pay"
version = "1.0.0"
[contract.pay]
[handler.pay]
[capabilities]
files = [{ path = "in", mode = "read" }, { path = "out", mode = "write" }]
env = ["TOKEN"]
state = [{ bucket = "balances" }]
memory = "128MiB"
"#;

    fn asks() -> Manifest {
        Manifest::parse(ASKS, "pay.toml").expect("a good manifest")
    }

    #[test]
    fn a_grant_is_written_into_an_empty_file_and_satisfies_the_manifest() {
        let added = add("", &asks(), &BTreeMap::from([("in".to_owned(), "/srv/in".to_owned())])).expect("written");
        insta::assert_snapshot!(added.text);
        assert_eq!(added.table, added.text);
        let grants = read(&added.text).expect("reads back");
        warp_manifest::check_grant(&asks(), grants.get("pay")).expect("everything that was asked for is granted");
        let again = add(&added.text, &asks(), &BTreeMap::new()).expect("written");
        assert_eq!((again.text, again.changes), (added.text, Vec::new()), "a second time changes nothing");
    }

    #[test]
    fn everything_else_in_the_file_stays_as_it_is() {
        let before = "# ours\nworkers = 4 # few\n\n[grant.pay] # reviewed by Ada\nenv = [\"OTHER\"] # kept\nmemory = \"32MiB\" # too little\n\n[grant.other]\nenv = []\n\n[log]\nlevel = \"warn\"\n";
        let added = add(before, &asks(), &BTreeMap::new()).expect("written");
        insta::assert_snapshot!(added.text);
        let grants = read(&added.text).expect("reads back");
        warp_manifest::check_grant(&asks(), grants.get("pay")).expect("everything that was asked for is granted");
    }

    #[test]
    fn a_directory_granted_for_reading_is_opened_for_a_manifest_that_writes() {
        let before = "[grant.pay.files]\nout = { host = \"/data\", mode = \"read\" }\n";
        let added = add(before, &asks(), &BTreeMap::new()).expect("written");
        let grants = read(&added.text).expect("reads back");
        assert_eq!(grants["pay"].files["out"].host, "/data");
        warp_manifest::check_grant(&asks(), grants.get("pay")).expect("everything that was asked for is granted");
    }

    #[test]
    fn what_is_no_grant_is_refused() {
        let refused = |text: &str| add(text, &asks(), &BTreeMap::new()).err().expect("refused");
        assert_eq!(refused("grant = 3"), "`grant` is not a table");
        assert_eq!(refused("[grant]\npay = true"), "`grant.pay` is not a table");
        assert_eq!(refused("[grant.pay]\nenv = \"TOKEN\""), "`grant.pay.env` is not a list");
        assert!(refused("[grant.pay]\nnetwork = true").starts_with("the table would not be a grant: unknown field `network`"));
        let unasked = add("", &asks(), &BTreeMap::from([("tmp".to_owned(), "/tmp".to_owned())]));
        assert_eq!(unasked.err().as_deref(), Some("`pay` asks for no directory `tmp`; it asks for in, out"));
    }
}
