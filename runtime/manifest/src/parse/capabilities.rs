//! What a plugin asks for: directories, variables, buckets, memory, origins.

use super::reader::{Node, Reader, View};
use crate::model::{Bucket, Capabilities, Commit, FileAccess, FileMode, WriteRule};
use crate::support::enforced;
use crate::text::shown;

/// One page of WebAssembly memory: less cannot be had.
const LEAST_MEMORY: u64 = 64 << 10;
/// All that a 32-bit guest can address.
const MOST_MEMORY: u64 = 4 << 30;
const LONGEST_NAME: usize = 64;
/// As many directories, variables or buckets as a reviewer can still read.
const MOST_ASKED: usize = 64;

pub(super) fn capabilities<'t>(reader: &mut Reader<'t>, view: &View<'t>) -> Capabilities {
    reader.only(view, &["files", "http", "env", "state", "memory"]);
    let files = view.get("files").map(|node| files(reader, &node)).unwrap_or_default();
    let env = view.get("env").map(|node| env(reader, &node)).unwrap_or_default();
    let state = view.get("state").map(|node| state(reader, &node)).unwrap_or_default();
    let memory = view.get("memory").and_then(|node| reader.size(&node, LEAST_MEMORY..=MOST_MEMORY));
    let http = view.get("http").map(|node| http(reader, &node)).unwrap_or_default();
    Capabilities { files, http, env, state, memory }
}

fn files<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<FileAccess> {
    let mut files: Vec<FileAccess> = Vec::new();
    for table in tables(reader, node) {
        reader.only(&table, &["path", "mode"]);
        let path = match table.get("path") {
            Some(node) => reader.text(&node).filter(|path| path_is_good(reader, &node, path)).map(|path| (path, node)),
            None => {
                reader.missing(&table, "path", "write the directory as the guest names it, such as `path = \"in\"`");
                None
            }
        };
        let mode = match table.get("mode") {
            Some(node) => reader.choice(&node, &[("read", FileMode::Read), ("write", FileMode::Write)]),
            None => {
                reader.missing(&table, "mode", "write `mode = \"read\"` or `mode = \"write\"`");
                None
            }
        };
        let (Some((path, node)), Some(mode)) = (path, mode) else { continue };
        if files.iter().any(|earlier| earlier.path == path) {
            reader.wrong(&node, format!("directory `{}` is asked for twice", shown(path)), "keep one of them");
        } else {
            files.push(FileAccess { path: path.to_owned(), mode });
        }
    }
    files
}

/// A path names a directory inside the guest; it must mean the same wherever it is read.
fn path_is_good(reader: &mut Reader<'_>, node: &Node<'_>, path: &str) -> bool {
    let problem = if path.is_empty() {
        "an empty path".to_owned()
    } else if path.starts_with('/') || path.contains(':') {
        format!("`{}` is not relative", shown(path))
    } else if path.contains('\\') || path.chars().any(char::is_control) {
        format!("`{}` holds a backslash or control character", shown(path))
    } else if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        format!("`{}` holds an empty part, `.` or `..`", shown(path))
    } else {
        return true;
    };
    reader.wrong(node, problem, "write a relative path such as `in` or `data/in`; the operator's grant says where it lies");
    false
}

fn env<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (node, name) in texts(reader, node) {
        let good = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            && name.len() <= 200
            && name.bytes().next().is_some_and(|first| !first.is_ascii_digit());
        if !good {
            let remedy = "write letters, digits and underscores, not beginning with a digit, such as `BANK_TOKEN`";
            reader.wrong(&node, format!("`{}` is not the name of a variable", shown(name)), remedy);
        } else if names.iter().any(|earlier| earlier == name) {
            reader.wrong(&node, format!("variable `{name}` is asked for twice"), "keep one of them");
        } else {
            names.push(name.to_owned());
        }
    }
    names
}

fn state<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    for table in tables(reader, node) {
        reader.only(&table, &["bucket", "commit", "write"]);
        let commit = reader.choice_or(&table, "commit", &[("settle", Commit::Settle), ("now", Commit::Now)], Commit::Settle);
        let write = reader.choice_or(&table, "write", &[("any", WriteRule::Any), ("under-mutex", WriteRule::UnderMutex)], WriteRule::Any);
        let Some(node) = table.get("bucket") else {
            reader.missing(&table, "bucket", "write its name, such as `bucket = \"balances\"`");
            continue;
        };
        let Some(bucket) = reader.text(&node) else { continue };
        let good = bucket.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
            && bucket.len() <= LONGEST_NAME
            && bucket.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric());
        if !good {
            let remedy = format!("write up to {LONGEST_NAME} lower-case letters, digits, `-` and `_`, such as `balances`");
            reader.wrong(&node, format!("`{}` is not the name of a bucket", shown(bucket)), remedy);
        } else if buckets.iter().any(|earlier| earlier.bucket == bucket) {
            reader.wrong(&node, format!("bucket `{bucket}` is asked for twice"), "keep one of them");
        } else {
            buckets.push(Bucket { bucket: bucket.to_owned(), commit, write });
        }
    }
    buckets
}

fn http<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<String> {
    let mut origins = Vec::new();
    for (node, origin) in texts(reader, node) {
        if origin_is_good(origin) {
            origins.push(origin.to_owned());
        } else {
            let remedy = "write scheme and host without a path, such as `https://api.bank.example`";
            reader.wrong(&node, format!("`{}` is not an origin", shown(origin)), remedy);
        }
    }
    if !enforced("capabilities.http") {
        reader.not_supported(node, "`capabilities.http`");
        return Vec::new();
    }
    origins
}

fn origin_is_good(origin: &str) -> bool {
    let Some(authority) = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://")) else { return false };
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "443"));
    let host_is_good = !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.');
    host_is_good && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// The tables of a list of tables; what is no table is refused and left out.
fn tables<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<View<'t>> {
    items(reader, node).iter().filter_map(|item| reader.table(item)).collect()
}

/// The texts of a list of texts; what is no text is refused and left out.
fn texts<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<(Node<'t>, &'t str)> {
    items(reader, node).into_iter().filter_map(|item| reader.text(&item).map(|text| (item, text))).collect()
}

fn items<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Vec<Node<'t>> {
    let items = reader.list(node).unwrap_or_default();
    if items.len() > MOST_ASKED {
        reader.wrong(node, format!("{} entries", items.len()), format!("ask for {MOST_ASKED} at most"));
        return Vec::new();
    }
    items
}
