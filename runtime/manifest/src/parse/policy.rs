//! The policy families of one place, a contract or a handler.
//!
//! Families that no part of the host enforces yet are read and checked like the others, so that an author learns
//! of every mistake at once, and then refused.

use std::time::Duration;

use warp_domain::backoff::LONGEST_DELAY;
use warp_domain::key::KeyTemplate;
use warp_domain::policy::{Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry, Timeout, TimeoutMode};

use super::reader::{Node, Reader, View};
use crate::model::{CircuitBreaker, RateLimit, RateStyle};
use crate::support::enforced;
use crate::text::shown;

/// The keys of a place that declare policy.
pub(super) const FAMILIES: [&str; 6] = ["mutex", "semaphore", "rate_limit", "retry", "timeout", "circuit_breaker"];

/// Waits when `retry` names none.
const DEFAULT_DELAYS: [Duration; 3] = [Duration::from_secs(15), Duration::from_secs(60), Duration::from_secs(300)];
/// More keys than this on one job would hold more of the ledger than any order of taking them justifies.
const MOST_KEYS: usize = 16;
const MOST_DELAYS: usize = 64;
const MILLISECOND: Duration = Duration::from_millis(1);
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
const MODES: &[(&str, Mode)] = &[("skip", Mode::Skip), ("wait", Mode::Wait)];

/// Where a policy is declared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Contract,
    Handler,
}

/// What one place declares.
#[derive(Default)]
pub(super) struct Families {
    pub declared: Declared,
    pub rate_limit: Option<RateLimit>,
    pub circuit_breaker: Option<CircuitBreaker>,
    pub total_timeout: Option<(Duration, TimeoutMode)>,
    /// The place and path of the mutex or semaphore.
    pub concurrency_at: Option<(std::ops::Range<usize>, String)>,
}

/// Reads every family of a place.
pub(super) fn families<'t>(reader: &mut Reader<'t>, view: &View<'t>, place: Place) -> Families {
    let mut families = Families::default();
    concurrency_family(reader, view, &mut families);
    families.declared.retry = family(reader, view, "retry", retry);
    families.rate_limit = family(reader, view, "rate_limit", rate_limit);
    families.circuit_breaker = family(reader, view, "circuit_breaker", circuit_breaker);
    if let Some(read) = family(reader, view, "timeout", |reader, view| Some(timeout(reader, view, place))) {
        (families.declared.timeout, families.total_timeout) = read;
    }
    families
}

/// One family, if it is there and this version enforces it.
fn family<'t, T>(
    reader: &mut Reader<'t>,
    view: &View<'t>,
    word: &str,
    read: impl FnOnce(&mut Reader<'t>, &View<'t>) -> Option<T>,
) -> Option<T> {
    let node = view.get(word)?;
    let value = reader.table(&node).and_then(|table| read(reader, &table));
    if !enforced(word) {
        reader.not_supported(&node, &format!("`{word}`"));
        return None;
    }
    value
}

fn concurrency_family<'t>(reader: &mut Reader<'t>, view: &View<'t>, families: &mut Families) {
    let mutex = view.get("mutex");
    let semaphore = view.get("semaphore");
    if let (Some(mutex), Some(semaphore)) = (&mutex, &semaphore) {
        let later = if mutex.span.start > semaphore.span.start { mutex } else { semaphore };
        reader.wrong(later, "mutex and semaphore are one family, and both are declared here", "keep one of them");
    }
    for (node, kind) in [(mutex, ConcurrencyKind::Mutex), (semaphore, ConcurrencyKind::Semaphore)] {
        let Some(node) = node else { continue };
        if let Some(read) = reader.table(&node).and_then(|table| concurrency(reader, &table, kind)) {
            families.declared.concurrency = Some(read);
            families.concurrency_at = Some((node.span, node.path));
        }
    }
}

fn concurrency<'t>(reader: &mut Reader<'t>, view: &View<'t>, kind: ConcurrencyKind) -> Option<Concurrency> {
    let (default_mode, word) = match kind {
        ConcurrencyKind::Mutex => (Mode::Skip, "mutex"),
        ConcurrencyKind::Semaphore => (Mode::Wait, "semaphore"),
    };
    // `limit` is known in both, so that a mutex with one gets the sentence below and not "unknown key".
    reader.only(view, &["key", "keys", "limit", "weight", "mode", "order", "on_retry"]);
    let keys = keys(reader, view);
    let limit = match (kind, view.get("limit")) {
        (ConcurrencyKind::Mutex, None) => Some(1),
        (ConcurrencyKind::Mutex, Some(node)) => {
            reader.wrong(&node, "a mutex admits one and takes no limit", "remove it, or write `semaphore` instead of `mutex`");
            None
        }
        (ConcurrencyKind::Semaphore, Some(node)) if is_zero(&node) => {
            let remedy = "write 1 or more; an operator pauses a key with `warp-host limits set`";
            reader.wrong(&node, "a limit of 0 would let no job of the key run", remedy);
            None
        }
        (ConcurrencyKind::Semaphore, Some(node)) => reader.whole(&node, 1..=u32::MAX),
        (ConcurrencyKind::Semaphore, None) => {
            reader.missing(view, "limit", "write how many may run at once, such as `limit = 5`");
            None
        }
    };
    let weight = weight(reader, view, kind, limit);
    let mode = reader.choice_or(view, "mode", MODES, default_mode);
    let order = reader.choice_or(view, "order", &[("any", Order::Any), ("fifo", Order::Fifo)], Order::Any);
    if let (Order::Fifo, Mode::Skip, Some(node)) = (order, mode, view.get("order")) {
        let problem = match view.get("mode") {
            Some(_) => "an order makes no sense for jobs that are skipped".to_owned(),
            None => format!("an order makes no sense for jobs that are skipped, and a {word} skips unless told otherwise"),
        };
        reader.wrong(&node, problem, "write `mode = \"wait\"`, or remove `order`");
    }
    let on_retry = reader.choice_or(view, "on_retry", &[("block", OnRetry::Block), ("pass", OnRetry::Pass)], OnRetry::Block);
    let ordered = view.get("order").is_some_and(|node| node.value.as_str() != Some("any"));
    if let (false, Some(node)) = (ordered, view.get("on_retry")) {
        reader.wrong(&node, "says who goes first, and no order is declared", "write `order = \"fifo\"`, or remove it");
    }
    Some(Concurrency { kind, keys: keys?, limit: limit?, weight: weight?, mode, order, on_retry })
}

fn is_zero(node: &Node<'_>) -> bool {
    node.value.as_integer().is_some_and(|written| written.as_str().bytes().all(|b| matches!(b, b'0' | b'+' | b'-' | b'_')))
}

fn weight<'t>(reader: &mut Reader<'t>, view: &View<'t>, kind: ConcurrencyKind, limit: Option<u32>) -> Option<u32> {
    let Some(node) = view.get("weight") else { return Some(1) };
    let weight = reader.whole(&node, 1..=u32::MAX)?;
    if let Some(limit) = limit.filter(|limit| weight > *limit) {
        let remedy = match kind {
            ConcurrencyKind::Mutex => "remove it, or write `semaphore` with a limit instead of `mutex`",
            ConcurrencyKind::Semaphore => "raise the limit, or lower the weight",
        };
        reader.wrong(&node, format!("weight {weight} is above the limit {limit}, so the job could never run"), remedy);
        return None;
    }
    Some(weight)
}

/// `key` or `keys`, exactly one of them.
fn keys<'t>(reader: &mut Reader<'t>, view: &View<'t>) -> Option<Vec<KeyTemplate>> {
    match (view.get("key"), view.get("keys")) {
        (None, None) => {
            reader.missing(view, "key", "write `key = \"…\"`, or `keys = [\"…\", \"…\"]` for several");
            None
        }
        (Some(_), Some(keys)) => {
            reader.wrong(&keys, "`key` and `keys` are both given", "keep one of them");
            None
        }
        (Some(key), None) => template(reader, &key).map(|template| vec![template]),
        (None, Some(keys)) => {
            let items = reader.list(&keys)?;
            if items.is_empty() || items.len() > MOST_KEYS {
                reader.wrong(&keys, format!("{} keys", items.len()), format!("write 1 to {MOST_KEYS} keys"));
                return None;
            }
            let count = items.len();
            let mut templates: Vec<KeyTemplate> = Vec::with_capacity(count);
            for item in items {
                let Some(read) = template(reader, &item) else { continue };
                if templates.contains(&read) {
                    reader.wrong(&item, format!("key `{}` stands here twice", shown(&read.to_string())), "remove one");
                } else {
                    templates.push(read);
                }
            }
            (templates.len() == count).then_some(templates)
        }
    }
}

fn template<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Option<KeyTemplate> {
    use warp_domain::key::TemplateError;
    let text = reader.text(node)?;
    let refused = match text.parse::<KeyTemplate>() {
        Ok(template) => return Some(template),
        Err(refused) => refused,
    };
    let (problem, remedy) = match refused {
        TemplateError::Empty => ("a key must not be empty".to_owned(), "write a text, such as `payment:{customer_id}`"),
        TemplateError::Unclosed { at, .. } => {
            (format!("`{}` opens a brace at byte {at} that is never closed", shown(text)), "close it, or write `{{` for a brace in the key")
        }
        TemplateError::Unopened { at, .. } => (
            format!("`{}` closes a brace at byte {at} that was never opened", shown(text)),
            "open it, or write `}}` for a brace in the key",
        ),
        TemplateError::BadPath { path, .. } => {
            (format!("`{{{}}}` is not a path into the payload", shown(&path)), "write `{field}`, `{order.id}` or `{lines[0].sku}`")
        }
    };
    reader.wrong(node, problem, remedy);
    None
}

fn retry<'t>(reader: &mut Reader<'t>, view: &View<'t>) -> Option<Retry> {
    reader.only(view, &["max", "delays", "jitter"]);
    let max = match view.get("max") {
        Some(node) => reader.whole(&node, 0..=u32::MAX),
        None => {
            reader.missing(view, "max", "write how many attempts may follow the first, such as `max = 3`");
            None
        }
    };
    let delays = match view.get("delays") {
        None => Some(DEFAULT_DELAYS.to_vec()),
        Some(node) => delays(reader, &node),
    };
    let jitter_permille = match view.get("jitter") {
        None => Some(0),
        Some(node) => jitter(reader, &node),
    };
    Some(Retry { max: max?, delays: delays?, jitter_permille: jitter_permille? })
}

fn delays<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Option<Vec<Duration>> {
    let items = reader.list(node)?;
    if items.is_empty() || items.len() > MOST_DELAYS {
        let remedy = format!("write 1 to {MOST_DELAYS}, the last one repeats; or remove `delays` for 15s, 1m, 5m");
        reader.wrong(node, format!("{} delays", items.len()), remedy);
        return None;
    }
    let count = items.len();
    let delays: Vec<_> = items.iter().filter_map(|item| reader.duration(item, Duration::ZERO..=LONGEST_DELAY)).collect();
    (delays.len() == count).then_some(delays)
}

fn jitter<'t>(reader: &mut Reader<'t>, node: &Node<'t>) -> Option<u16> {
    let jitter = reader.number(node)?;
    if !(0.0..=1.0).contains(&jitter) {
        reader.wrong(node, "out of range", "write a part of the delay from 0 to 1, such as `0.1` for a tenth more or less");
        return None;
    }
    // In range by the line above, so the cast only drops what is finer than a thousandth.
    Some((jitter * 1000.0).round() as u16)
}

type Timeouts = (Option<Timeout>, Option<(Duration, TimeoutMode)>);

fn timeout<'t>(reader: &mut Reader<'t>, view: &View<'t>, place: Place) -> Timeouts {
    reader.only(view, &["per_attempt", "total", "mode"]);
    let mode = reader.choice_or(view, "mode", &[("fail", TimeoutMode::Fail), ("delete", TimeoutMode::Delete)], TimeoutMode::Fail);
    let per_attempt = view.get("per_attempt").map(|node| reader.duration(&node, MILLISECOND..=LONGEST_DELAY));
    let total = view.get("total").map(|node| (reader.duration(&node, MILLISECOND..=LONGEST_DELAY), node));
    if per_attempt.is_none() && total.is_none() {
        reader.missing(view, "per_attempt", "write how long one attempt may take, such as `per_attempt = \"30s\"`");
    }
    let total = total.and_then(|(read, node)| {
        if place == Place::Handler {
            let remedy = "move it to the contract; a handler declares `per_attempt`";
            reader.wrong(&node, "the total time counts from the enqueue, when no handler is known yet", remedy);
            return None;
        }
        if !enforced("timeout.total") {
            reader.not_supported(&node, "`timeout.total`");
            return None;
        }
        read
    });
    (per_attempt.flatten().map(|per_attempt| Timeout { per_attempt, mode }), total.map(|total| (total, mode)))
}

fn rate_limit<'t>(reader: &mut Reader<'t>, view: &View<'t>) -> Option<RateLimit> {
    reader.only(view, &["key", "count", "per", "style", "mode"]);
    let key = match view.get("key") {
        Some(node) => template(reader, &node),
        None => {
            reader.missing(view, "key", "write what is limited, such as `key = \"bank-api\"`");
            None
        }
    };
    let count = match view.get("count") {
        Some(node) => reader.whole(&node, 1..=u32::MAX),
        None => {
            reader.missing(view, "count", "write how many may start in each window, such as `count = 100`");
            None
        }
    };
    let per = match view.get("per") {
        Some(node) => reader.duration(&node, Duration::from_secs(1)..=WEEK),
        None => {
            reader.missing(view, "per", "write how long the window is, such as `per = \"1m\"`");
            None
        }
    };
    let styles = [("fixed", RateStyle::Fixed), ("sliding", RateStyle::Sliding), ("token-bucket", RateStyle::TokenBucket)];
    let style = reader.choice_or(view, "style", &styles, RateStyle::Fixed);
    let mode = reader.choice_or(view, "mode", MODES, Mode::Wait);
    Some(RateLimit { key: key?, count: count?, per: per?, style, mode })
}

fn circuit_breaker<'t>(reader: &mut Reader<'t>, view: &View<'t>) -> Option<CircuitBreaker> {
    reader.only(view, &["group", "threshold", "open", "reset_jitter"]);
    let group = view.get("group").map(|node| super::name(reader, &node));
    let threshold = view.get("threshold").map_or(Some(3), |node| reader.whole(&node, 1..=u32::MAX));
    let open = view.get("open").map_or(Some(Duration::from_secs(60)), |node| reader.duration(&node, MILLISECOND..=WEEK));
    let jitter = view.get("reset_jitter").map_or(Some(Duration::from_secs(10)), |node| reader.duration(&node, Duration::ZERO..=WEEK));
    let group = match group {
        Some(read) => Some(read?.to_owned()),
        None => None,
    };
    Some(CircuitBreaker { group, threshold: threshold?, open: open?, reset_jitter: jitter? })
}

/// What no manifest can show while the families are refused, so that switching one on is deleting its line.
#[cfg(test)]
mod tests {
    use toml::de::DeTable;

    use super::*;

    /// Reads the only table of a text with one of the readers above.
    fn read<T>(text: &str, read: impl for<'t> FnOnce(&mut Reader<'t>, &View<'t>) -> T) -> T {
        let root = DeTable::parse(text).expect("TOML");
        let mut reader = Reader::new(text, "p.toml");
        let value = read(&mut reader, &View::root(root.get_ref()));
        assert_eq!(reader.finish().0, [], "{text}");
        value
    }

    #[test]
    fn families_that_wait_for_their_enforcement_are_read_in_full() {
        let key: KeyTemplate = "bank-api".parse().expect("a key");
        let limit = |style, mode| Some(RateLimit { key: key.clone(), count: 100, per: Duration::from_secs(60), style, mode });
        let text = "key = \"bank-api\"\ncount = 100\nper = \"1m\"\n";
        assert_eq!(read(text, rate_limit), limit(RateStyle::Fixed, Mode::Wait));
        let written = format!("{text}style = \"token-bucket\"\nmode = \"skip\"\n");
        assert_eq!(read(&written, rate_limit), limit(RateStyle::TokenBucket, Mode::Skip));

        let breaker = |group: Option<&str>, threshold, [open, jitter]: [u64; 2]| {
            let [open, reset_jitter] = [open, jitter].map(Duration::from_secs);
            Some(CircuitBreaker { group: group.map(str::to_owned), threshold, open, reset_jitter })
        };
        assert_eq!(read("", circuit_breaker), breaker(None, 3, [60, 10]));
        let written = "group = \"bank\"\nthreshold = 5\nopen = \"2m\"\nreset_jitter = \"0s\"\n";
        assert_eq!(read(written, circuit_breaker), breaker(Some("bank"), 5, [120, 0]));
    }
}
