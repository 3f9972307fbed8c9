//! Text forms that all drivers share: payloads, declared and stamped policies.
//!
//! Policies are interned by content, so their text must be canonical: same rules, same bytes. Field order is
//! the struct order below, durations are milliseconds, and absent families are left out.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use warp_domain::key::{Found, Path, Payload, Step};
use warp_domain::policy::{
    Concurrency, ConcurrencyKind, Declared, Mode, OnRetry, Order, Retry, Source, Stamp, Stamped, Timeout, TimeoutMode,
};

use crate::store::{MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_DEPTH, NewJob, Settle, StateChange, StateWrite};
use warp_domain::ending::Ending;

/// A parsed payload.
pub struct JsonPayload(Value);

/// Why a payload was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Not JSON.
    #[error("the payload is not JSON: {0}")]
    NotJson(String),
    /// Too large.
    #[error("the payload has {bytes} bytes; {MAX_PAYLOAD_BYTES} are allowed")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// Too deep.
    #[error("the payload is nested deeper than {MAX_PAYLOAD_DEPTH} levels")]
    TooDeep,
    /// A NUL character, raw or escaped.
    #[error("the payload contains a NUL character, which not every database can store")]
    Nul,
}

impl JsonPayload {
    /// Parses and checks a payload as every entry path must.
    ///
    /// # Errors
    /// When it is not JSON, too large, too deep, or contains NUL.
    pub fn parse(text: &str) -> Result<Self, PayloadError> {
        if text.len() > MAX_PAYLOAD_BYTES {
            return Err(PayloadError::TooLarge { bytes: text.len() });
        }
        if depth(text) > MAX_PAYLOAD_DEPTH {
            return Err(PayloadError::TooDeep);
        }
        // NUL is checked on the text: raw it is no JSON anyway, and escaped it would be hidden in a string.
        if text.contains('\0') || has_escaped_nul(text) {
            return Err(PayloadError::Nul);
        }
        serde_json::from_str(text).map(JsonPayload).map_err(|error| PayloadError::NotJson(error.to_string()))
    }
}

/// The deepest nesting of brackets outside strings. Works on any text, so that a parser's own limit is never hit.
fn depth(text: &str) -> usize {
    let (mut deepest, mut now, mut in_string, mut escaped) = (0usize, 0usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                now += 1;
                deepest = deepest.max(now);
            }
            b']' | b'}' if !in_string => now = now.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// `\u0000` that is not itself behind a backslash.
fn has_escaped_nul(text: &str) -> bool {
    text.match_indices("\\u0000").any(|(at, _)| text.as_bytes()[..at].iter().rev().take_while(|b| **b == b'\\').count() % 2 == 0)
}

impl Payload for JsonPayload {
    fn find(&self, path: &Path) -> Found<'_> {
        let mut at = &self.0;
        for step in path.steps() {
            let next = match step {
                Step::Field(name) => at.get(name.as_str()),
                Step::Index(index) => at.get(index),
            };
            match next {
                Some(value) => at = value,
                None => return Found::Missing,
            }
        }
        match at {
            Value::Null => Found::Missing,
            Value::Bool(value) => Found::Scalar(Cow::Borrowed(if *value { "true" } else { "false" })),
            Value::Number(number) => Found::Scalar(Cow::Owned(number.to_string())),
            Value::String(text) => Found::Scalar(Cow::Borrowed(text)),
            Value::Array(_) | Value::Object(_) => Found::NotScalar,
        }
    }

    fn field_names(&self) -> Vec<String> {
        self.0.as_object().map(|fields| fields.keys().cloned().collect()).unwrap_or_default()
    }
}

/// Checks a contract, handler or queue name.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn check_name(what: &str, name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("the {what} is empty"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("the {what} has {} bytes; {MAX_NAME_BYTES} are allowed", name.len()));
    }
    match name.chars().find(|c| c.is_control()) {
        Some(control) => Err(format!("the {what} {name:?} contains the control character {:?}", control)),
        None => Ok(()),
    }
}

/// Checks everything about a new job that needs no database: names, payload, and that its explicit keys render.
///
/// # Errors
/// A sentence that says what is wrong; it becomes [`crate::EnqueueVerdict::Refused`].
pub fn check_new_job(job: &NewJob) -> Result<(), String> {
    check_name("contract", &job.contract)?;
    check_name("queue", &job.queue)?;
    if let Some(unique) = &job.unique_key {
        check_name("unique key", unique)?;
    }
    for (name, value) in &job.metadata {
        check_name("metadata name", name)?;
        if value.contains('\0') {
            return Err(format!("the metadata value of {name:?} contains a NUL character"));
        }
    }
    let payload = JsonPayload::parse(&job.payload).map_err(|error| error.to_string())?;
    if let Some(concurrency) = &job.explicit.concurrency {
        for key in &concurrency.keys {
            key.render(&payload).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Checks everything about a run's end that needs no database; what it refuses can never be stored.
///
/// # Errors
/// A sentence that says what is wrong; the job is Failed with it ([`crate::SettleVerdict::Poison`]).
pub fn check_settle(settle: &Settle) -> Result<(), String> {
    let Ending::Completed { result } = &settle.ending else { return Ok(()) };
    if result.as_deref().is_some_and(|result| result.contains('\0')) {
        return Err("the result contains a NUL character".to_owned());
    }
    for child in &settle.children {
        check_new_job(child).map_err(|reason| format!("a job that it enqueued was refused: {reason}"))?;
    }
    settle.state.iter().try_for_each(check_state_write)
}

/// Checks a write to shared state.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn check_state_write(write: &StateWrite) -> Result<(), String> {
    let StateWrite { bucket, key, change } = write;
    let texts = match change {
        StateChange::Put(value) => [value.as_deref(), None],
        StateChange::CompareAndSet { expected, value } => [value.as_deref(), expected.as_deref()],
        StateChange::Add(_) => [None, None],
    };
    let nul = |text: &str| text.contains('\0');
    if nul(bucket) || nul(key) || texts.into_iter().flatten().any(nul) {
        return Err(format!("the state write to {key:?} in bucket {bucket:?} contains a NUL character"));
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct StampText {
    #[serde(skip_serializing_if = "Option::is_none")]
    concurrency: Option<(ConcurrencyText, SourceText)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry: Option<(RetryText, SourceText)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<(TimeoutText, SourceText)>,
}

#[derive(Serialize, Deserialize)]
struct ConcurrencyText {
    kind: String,
    keys: Vec<String>,
    limit: u32,
    weight: u32,
    mode: String,
    order: String,
    on_retry: String,
}

#[derive(Serialize, Deserialize)]
struct RetryText {
    max: u32,
    delays_ms: Vec<u64>,
    jitter_permille: u16,
}

#[derive(Serialize, Deserialize)]
struct TimeoutText {
    per_attempt_ms: u64,
    mode: String,
}

#[derive(Serialize, Deserialize)]
struct SourceText {
    from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
}

/// A stored policy that this build cannot read: written by a newer one, or damaged.
#[derive(Debug, thiserror::Error)]
#[error("the stored policy cannot be read by this version: {0}")]
pub struct PolicyTextError(String);

impl PolicyTextError {
    fn unknown(what: &str, word: &str) -> Self {
        PolicyTextError(format!("unknown {what} {word:?}"))
    }
}

/// The canonical text of a stamp.
#[must_use]
pub fn encode_stamp(stamp: &Stamp) -> String {
    let Stamp { concurrency, retry, timeout } = stamp;
    let text = StampText {
        concurrency: concurrency.as_ref().map(|stamped| (concurrency_text(&stamped.value), source_text(&stamped.source))),
        retry: retry.as_ref().map(|stamped| (retry_text(&stamped.value), source_text(&stamped.source))),
        timeout: timeout.as_ref().map(|stamped| (timeout_text(&stamped.value), source_text(&stamped.source))),
    };
    serde_json::to_string(&text).unwrap_or_else(|_| unreachable!("strings and numbers always serialise"))
}

/// Reads what [`encode_stamp`] wrote.
///
/// # Errors
/// When the text is not of this version.
pub fn decode_stamp(text: &str) -> Result<Stamp, PolicyTextError> {
    let StampText { concurrency, retry, timeout } = serde_json::from_str(text).map_err(|error| PolicyTextError(error.to_string()))?;
    Ok(Stamp {
        concurrency: concurrency
            .map(|(value, source)| Ok::<_, PolicyTextError>(Stamped { value: concurrency_value(value)?, source: source_value(source)? }))
            .transpose()?,
        retry: retry
            .map(|(value, source)| Ok::<_, PolicyTextError>(Stamped { value: retry_value(value), source: source_value(source)? }))
            .transpose()?,
        timeout: timeout
            .map(|(value, source)| Ok::<_, PolicyTextError>(Stamped { value: timeout_value(value)?, source: source_value(source)? }))
            .transpose()?,
    })
}

/// The canonical text of what a caller declared: a stamp whose every source is the enqueue call.
#[must_use]
pub fn encode_declared(declared: &Declared) -> String {
    let Declared { concurrency, retry, timeout } = declared.clone();
    encode_stamp(&Stamp {
        concurrency: concurrency.map(|value| Stamped { value, source: Source::Enqueue }),
        retry: retry.map(|value| Stamped { value, source: Source::Enqueue }),
        timeout: timeout.map(|value| Stamped { value, source: Source::Enqueue }),
    })
}

/// Reads what [`encode_declared`] wrote.
///
/// # Errors
/// When the text is not of this version.
pub fn decode_declared(text: &str) -> Result<Declared, PolicyTextError> {
    let Stamp { concurrency, retry, timeout } = decode_stamp(text)?;
    Ok(Declared { concurrency: concurrency.map(|s| s.value), retry: retry.map(|s| s.value), timeout: timeout.map(|s| s.value) })
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn concurrency_text(value: &Concurrency) -> ConcurrencyText {
    let Concurrency { kind, keys, limit, weight, mode, order, on_retry } = value;
    ConcurrencyText {
        kind: match kind {
            ConcurrencyKind::Mutex => "mutex",
            ConcurrencyKind::Semaphore => "semaphore",
        }
        .to_owned(),
        keys: keys.iter().map(ToString::to_string).collect(),
        limit: *limit,
        weight: *weight,
        mode: match mode {
            Mode::Skip => "skip",
            Mode::Wait => "wait",
        }
        .to_owned(),
        order: match order {
            Order::Any => "any",
            Order::Fifo => "fifo",
        }
        .to_owned(),
        on_retry: match on_retry {
            OnRetry::Block => "block",
            OnRetry::Pass => "pass",
        }
        .to_owned(),
    }
}

fn concurrency_value(text: ConcurrencyText) -> Result<Concurrency, PolicyTextError> {
    let ConcurrencyText { kind, keys, limit, weight, mode, order, on_retry } = text;
    Ok(Concurrency {
        kind: match kind.as_str() {
            "mutex" => ConcurrencyKind::Mutex,
            "semaphore" => ConcurrencyKind::Semaphore,
            other => return Err(PolicyTextError::unknown("kind", other)),
        },
        keys: keys.iter().map(|key| key.parse().map_err(|error| PolicyTextError(format!("{error}")))).collect::<Result<_, _>>()?,
        limit,
        weight,
        mode: match mode.as_str() {
            "skip" => Mode::Skip,
            "wait" => Mode::Wait,
            other => return Err(PolicyTextError::unknown("mode", other)),
        },
        order: match order.as_str() {
            "any" => Order::Any,
            "fifo" => Order::Fifo,
            other => return Err(PolicyTextError::unknown("order", other)),
        },
        on_retry: match on_retry.as_str() {
            "block" => OnRetry::Block,
            "pass" => OnRetry::Pass,
            other => return Err(PolicyTextError::unknown("on_retry", other)),
        },
    })
}

fn retry_text(value: &Retry) -> RetryText {
    let Retry { max, delays, jitter_permille } = value;
    RetryText { max: *max, delays_ms: delays.iter().copied().map(millis).collect(), jitter_permille: *jitter_permille }
}

fn retry_value(text: RetryText) -> Retry {
    let RetryText { max, delays_ms, jitter_permille } = text;
    Retry { max, delays: delays_ms.into_iter().map(Duration::from_millis).collect(), jitter_permille }
}

fn timeout_text(value: &Timeout) -> TimeoutText {
    let Timeout { per_attempt, mode } = value;
    TimeoutText {
        per_attempt_ms: millis(*per_attempt),
        mode: match mode {
            TimeoutMode::Fail => "fail",
            TimeoutMode::Delete => "delete",
        }
        .to_owned(),
    }
}

fn timeout_value(text: TimeoutText) -> Result<Timeout, PolicyTextError> {
    let TimeoutText { per_attempt_ms, mode } = text;
    let mode = match mode.as_str() {
        "fail" => TimeoutMode::Fail,
        "delete" => TimeoutMode::Delete,
        other => return Err(PolicyTextError::unknown("timeout mode", other)),
    };
    Ok(Timeout { per_attempt: Duration::from_millis(per_attempt_ms), mode })
}

fn source_text(source: &Source) -> SourceText {
    match source {
        Source::Enqueue => SourceText { from: "enqueue".to_owned(), name: None, digest: None },
        Source::Handler { name, digest } => {
            SourceText { from: "handler".to_owned(), name: Some(name.clone()), digest: Some(digest.to_string()) }
        }
        Source::Contract { name, digest } => {
            SourceText { from: "contract".to_owned(), name: Some(name.clone()), digest: Some(digest.to_string()) }
        }
    }
}

fn source_value(text: SourceText) -> Result<Source, PolicyTextError> {
    let SourceText { from, name, digest } = text;
    let digest = digest.map(|digest| digest.parse()).transpose().map_err(|error| PolicyTextError(format!("{error}")))?;
    match (from.as_str(), name, digest) {
        ("enqueue", None, None) => Ok(Source::Enqueue),
        ("handler", Some(name), Some(digest)) => Ok(Source::Handler { name, digest }),
        ("contract", Some(name), Some(digest)) => Ok(Source::Contract { name, digest }),
        (other, _, _) => Err(PolicyTextError::unknown("source", other)),
    }
}

#[cfg(test)]
mod tests {
    use warp_domain::Digest;

    use super::*;

    #[test]
    fn a_stamp_survives_its_text_whatever_it_holds() {
        let digest = Digest([9; 32]);
        let concurrency = |kind, mode, order, on_retry| Concurrency {
            kind,
            keys: vec!["a:{b}".parse().expect("a template"), "c".parse().expect("a template")],
            limit: 3,
            weight: 2,
            mode,
            order,
            on_retry,
        };
        for (kind, mode, order, on_retry, timeout) in [
            (ConcurrencyKind::Mutex, Mode::Skip, Order::Any, OnRetry::Block, TimeoutMode::Fail),
            (ConcurrencyKind::Semaphore, Mode::Wait, Order::Fifo, OnRetry::Pass, TimeoutMode::Delete),
        ] {
            let stamp = Stamp {
                concurrency: Some(Stamped { value: concurrency(kind, mode, order, on_retry), source: Source::Enqueue }),
                retry: Some(Stamped {
                    value: Retry { max: 3, delays: vec![Duration::from_secs(1)], jitter_permille: 100 },
                    source: Source::Handler { name: "h".into(), digest },
                }),
                timeout: Some(Stamped {
                    value: Timeout { per_attempt: Duration::from_millis(5), mode: timeout },
                    source: Source::Contract { name: "c".into(), digest },
                }),
            };
            assert_eq!(decode_stamp(&encode_stamp(&stamp)).expect("just written"), stamp);
        }
        assert_eq!(encode_stamp(&Stamp::default()), "{}");
        assert!(decode_stamp(r#"{"retry":[{"max":1,"delays_ms":[],"jitter_permille":0},{"from":"moon"}]}"#).is_err());
    }

    #[test]
    fn payloads_that_cannot_be_stored_are_refused() {
        let refused = |text: &str| JsonPayload::parse(text).err().map(|error| error.to_string());
        assert_eq!(refused(r#"{"a": [1, "\\u0000", {"b": null}]}"#), None, "an escaped backslash is no NUL");
        assert_eq!(
            refused(r#"{"a": "\u0000"}"#).as_deref(),
            Some("the payload contains a NUL character, which not every database can store")
        );
        assert_eq!(refused("{").as_deref(), Some("the payload is not JSON: EOF while parsing an object at line 1 column 1"));
        assert_eq!(refused(&"[".repeat(100_000)).as_deref(), Some("the payload is nested deeper than 127 levels"));
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert_eq!(refused(&nested(MAX_PAYLOAD_DEPTH)), None, "what is allowed can be parsed");
        assert_eq!(refused(&nested(MAX_PAYLOAD_DEPTH + 1)).as_deref(), Some("the payload is nested deeper than 127 levels"));
        let large = format!("\"{}\"", "x".repeat(MAX_PAYLOAD_BYTES));
        assert_eq!(refused(&large).as_deref(), Some("the payload has 10485762 bytes; 10485760 are allowed"));
        let lone = r#""\ud800""#;
        assert!(refused(lone).expect("a lone surrogate is no text").starts_with("the payload is not JSON: "));
    }
}
