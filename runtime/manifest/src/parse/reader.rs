//! Reading typed values out of TOML while collecting everything that is wrong with them.
//!
//! Every function that finds a mistake records it and answers `None`, so that a caller can go on and report the
//! rest of the file as well. The tree keeps byte spans; they become lines and columns only in a refusal.

use std::borrow::Cow;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use warp_domain::units;

use crate::refusal::{Location, Position, Refusal, RefusalKind, Warning};
use crate::text::{listed, nearest, shown, toml_key};

/// A value with its path and place.
#[derive(Clone)]
pub(super) struct Node<'t> {
    pub path: String,
    pub span: Range<usize>,
    pub value: &'t DeValue<'t>,
}

/// A table with its path and place.
#[derive(Clone)]
pub(super) struct View<'t> {
    pub path: String,
    pub span: Range<usize>,
    entries: &'t DeTable<'t>,
}

impl<'t> View<'t> {
    pub(super) fn root(entries: &'t DeTable<'t>) -> Self {
        View { path: String::new(), span: 0..0, entries }
    }

    /// The path of a key of this table.
    pub(super) fn path_of(&self, key: &str) -> String {
        let key = shown(&toml_key(key));
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn get(&self, key: &str) -> Option<Node<'t>> {
        self.entries.iter().find(|(name, _)| name.get_ref() == key).map(|(name, value)| self.node(name, value))
    }

    /// Every entry in the order of the text, each placed at its key.
    pub(super) fn entries(&self) -> Vec<(&'t str, Node<'t>)> {
        let mut entries: Vec<_> = self
            .entries
            .iter()
            .map(|(name, value)| (name.get_ref().as_ref(), Node { span: name.span(), ..self.node(name, value) }))
            .collect();
        entries.sort_by_key(|(_, node)| node.span.start);
        entries
    }

    fn node(&self, name: &'t Spanned<Cow<'t, str>>, value: &'t Spanned<DeValue<'t>>) -> Node<'t> {
        Node { path: self.path_of(name.get_ref()), span: value.span(), value: value.get_ref() }
    }
}

/// More mistakes than this in one text are counted and not printed: what comes then is noise, and finding the line
/// of each would cost a hostile text's author nothing and us much.
const MOST_SHOWN: usize = 100;

/// Collects what is wrong with one text. Places stay byte offsets until [`Reader::finish`].
pub(super) struct Reader<'t> {
    text: &'t str,
    file: &'t str,
    refusals: Vec<(Option<usize>, Refusal)>,
    warnings: Vec<(Option<usize>, Warning)>,
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str, file: &'t str) -> Self {
        Reader { text, file, refusals: Vec::new(), warnings: Vec::new() }
    }

    /// Everything found, each in the order of the text.
    pub(super) fn finish(self) -> (Vec<Refusal>, Vec<Warning>) {
        let Reader { text, file, mut refusals, mut warnings } = self;
        let place = |at: Option<usize>| at.map(|at| Position::of(text, at));
        refusals.sort_by_key(|(at, _)| *at);
        warnings.sort_by_key(|(at, _)| *at);
        let left_out = refusals.len().saturating_sub(MOST_SHOWN);
        let located = |(at, mut refusal): (Option<usize>, Refusal)| {
            refusal.location.at = place(at);
            refusal
        };
        let mut refusals: Vec<_> = refusals.into_iter().take(MOST_SHOWN).map(located).collect();
        if left_out > 0 {
            let location = Location { file: file.to_owned(), at: None, key: String::new() };
            let (problem, remedy) = (format!("{left_out} more mistakes are not shown"), "correct those above first".to_owned());
            refusals.push(Refusal { kind: RefusalKind::Manifest, location, problem, remedy });
        }
        let located = |(at, mut warning): (Option<usize>, Warning)| {
            warning.location.at = place(at);
            warning
        };
        (refusals, warnings.into_iter().take(MOST_SHOWN).map(located).collect())
    }

    pub(super) fn position(&self, at: usize) -> Position {
        Position::of(self.text, at)
    }

    /// Refuses whatever stands at `at` under `key`; absent, the whole file.
    pub(super) fn refuse(
        &mut self,
        kind: RefusalKind,
        at: Option<usize>,
        key: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let location = Location { file: self.file.to_owned(), at: None, key: key.to_owned() };
        self.refusals.push((at, Refusal { kind, location, problem: problem.into(), remedy: remedy.into() }));
    }

    pub(super) fn warn(&mut self, at: usize, key: &str, problem: impl Into<String>, remedy: impl Into<String>) {
        let location = Location { file: self.file.to_owned(), at: None, key: key.to_owned() };
        self.warnings.push((Some(at), Warning { location, problem: problem.into(), remedy: remedy.into() }));
    }

    /// Refuses a value that the author has to correct.
    pub(super) fn wrong(&mut self, node: &Node<'_>, problem: impl Into<String>, remedy: impl Into<String>) {
        self.refuse(RefusalKind::Manifest, Some(node.span.start), &node.path, problem, remedy);
    }

    /// Refuses what is right and cannot be enforced yet.
    pub(super) fn not_supported(&mut self, node: &Node<'_>, what: &str) {
        let problem = format!("{what} is not supported by this version (warp-host {})", crate::HOST_VERSION);
        let remedy = "remove it, or load the plugin into a host that enforces it";
        self.refuse(RefusalKind::NotSupported, Some(node.span.start), &node.path, problem, remedy);
    }

    /// Refuses a table that lacks a key.
    pub(super) fn missing(&mut self, view: &View<'_>, key: &str, remedy: impl Into<String>) {
        let at = (!view.path.is_empty()).then_some(view.span.start);
        self.refuse(RefusalKind::Manifest, at, &view.path_of(key), "missing", remedy);
    }

    /// Refuses every key of a table that is not known there.
    pub(super) fn only(&mut self, view: &View<'_>, known: &[&str]) {
        for (key, node) in view.entries() {
            if known.contains(&key) {
                continue;
            }
            let remedy = match nearest(key, known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known here: {}", listed(known, "and")),
            };
            self.wrong(&node, "unknown key", remedy);
        }
    }

    pub(super) fn table(&mut self, node: &Node<'t>) -> Option<View<'t>> {
        match node.value {
            DeValue::Table(entries) => Some(View { path: node.path.clone(), span: node.span.clone(), entries }),
            _ => self.expected(node, "a table", "write `[…]` or `{ … }`"),
        }
    }

    pub(super) fn list(&mut self, node: &Node<'t>) -> Option<Vec<Node<'t>>> {
        match node.value {
            DeValue::Array(items) => {
                let item = |(at, value): (usize, &'t Spanned<DeValue<'t>>)| Node {
                    path: format!("{}[{at}]", node.path),
                    span: value.span(),
                    value: value.get_ref(),
                };
                Some(items.iter().enumerate().map(item).collect())
            }
            _ => self.expected(node, "a list", "write `[…]`"),
        }
    }

    pub(super) fn text(&mut self, node: &Node<'t>) -> Option<&'t str> {
        match node.value {
            DeValue::String(text) => Some(text.as_ref()),
            _ => self.expected(node, "text", "write it in quotes"),
        }
    }

    /// A list of texts; one that is no text is refused and left out.
    pub(super) fn texts(&mut self, node: &Node<'t>) -> Option<Vec<(Node<'t>, &'t str)>> {
        let items = self.list(node)?;
        Some(items.into_iter().filter_map(|item| self.text(&item).map(|text| (item, text))).collect())
    }

    pub(super) fn whole(&mut self, node: &Node<'t>, allowed: RangeInclusive<u32>) -> Option<u32> {
        let remedy = format!("write a whole number from {} to {}", allowed.start(), allowed.end());
        let DeValue::Integer(written) = node.value else {
            return self.expected(node, "a whole number", remedy);
        };
        match i128::from_str_radix(written.as_str(), written.radix()).ok().and_then(|number| u32::try_from(number).ok()) {
            Some(number) if allowed.contains(&number) => Some(number),
            _ => {
                self.wrong(node, format!("`{}` is out of range", shown(&written.to_string())), remedy);
                None
            }
        }
    }

    pub(super) fn number(&mut self, node: &Node<'t>) -> Option<f64> {
        match node.value {
            DeValue::Float(written) => written.as_str().parse().ok(),
            DeValue::Integer(written) => i64::from_str_radix(written.as_str(), written.radix()).ok().map(|number| number as f64),
            _ => return self.expected(node, "a number", "write a number such as `0.1`"),
        }
        .or_else(|| {
            self.wrong(node, "not a number that can be held", "write a number such as `0.1`");
            None
        })
    }

    /// A duration within bounds. A bare number is refused for its missing unit.
    pub(super) fn duration(&mut self, node: &Node<'t>, allowed: RangeInclusive<Duration>) -> Option<Duration> {
        let text = self.with_unit(node, "duration", "write a whole number and a unit in quotes, such as `\"30s\"`")?;
        match units::parse_duration(text) {
            Ok(span) if allowed.contains(&span) => Some(span),
            Ok(_) => {
                let [least, most] = [allowed.start(), allowed.end()].map(|bound| units::format_duration(*bound));
                self.wrong(node, format!("`{}` is out of range", shown(text)), format!("write a duration from `{least}` to `{most}`"));
                None
            }
            Err(_) => {
                let problem = format!("`{}` is not a duration", shown(text));
                self.wrong(node, problem, "write a whole number and a unit, such as `250ms`, `30s`, `5m`, `2h` or `1d`");
                None
            }
        }
    }

    /// A size within bounds. A bare number is refused for its missing unit.
    pub(super) fn size(&mut self, node: &Node<'t>, allowed: RangeInclusive<u64>) -> Option<u64> {
        let text = self.with_unit(node, "size", "write a whole number and a unit in quotes, such as `\"64MiB\"`")?;
        match units::parse_size(text) {
            Ok(bytes) if allowed.contains(&bytes) => Some(bytes),
            Ok(_) => {
                let [least, most] = [allowed.start(), allowed.end()].map(|bound| units::format_size(*bound));
                self.wrong(node, format!("`{}` is out of range", shown(text)), format!("write a size from `{least}` to `{most}`"));
                None
            }
            Err(_) => {
                let problem = format!("`{}` is not a size", shown(text));
                self.wrong(node, problem, "write a whole number and a unit, such as `512KiB`, `64MiB` or `2GiB`");
                None
            }
        }
    }

    fn with_unit(&mut self, node: &Node<'t>, what: &str, remedy: &str) -> Option<&'t str> {
        match node.value {
            DeValue::String(text) => Some(text.as_ref()),
            DeValue::Integer(_) | DeValue::Float(_) => {
                self.wrong(node, format!("a {what} without a unit"), remedy);
                None
            }
            _ => self.expected(node, &format!("a {what}"), remedy),
        }
    }

    /// One of a closed set of words.
    pub(super) fn choice<T: Copy>(&mut self, node: &Node<'t>, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(node)?;
        let found = choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
            self.wrong(node, format!("`{}` is not a choice here", shown(text)), format!("write {}", listed(&words, "or")));
        }
        found
    }

    /// A choice that may be absent; a wrong one is refused and answers the default.
    pub(super) fn choice_or<T: Copy>(&mut self, view: &View<'t>, key: &str, choices: &[(&str, T)], default: T) -> T {
        view.get(key).and_then(|node| self.choice(&node, choices)).unwrap_or(default)
    }

    fn expected<T>(&mut self, node: &Node<'_>, what: &str, remedy: impl Into<String>) -> Option<T> {
        let found = match node.value {
            DeValue::String(_) => "text",
            DeValue::Integer(_) | DeValue::Float(_) => "a number",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        self.wrong(node, format!("expected {what}, found {found}"), remedy);
        None
    }
}
