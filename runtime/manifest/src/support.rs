//! What this version of the host can enforce: two tables, and nothing elsewhere knows.

/// The version that refusals name. One version for the whole workspace.
pub const HOST_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Every word of format 1 that `must_understand` may name.
pub const VOCABULARY: &[&str] = &[
    "capabilities",
    "capabilities.env",
    "capabilities.files",
    "capabilities.http",
    "capabilities.memory",
    "capabilities.state",
    "circuit_breaker",
    "commit",
    "handles",
    "jitter",
    "keys",
    "kind",
    "mode",
    "mutex",
    "on_retry",
    "order",
    "rate_limit",
    "retry",
    "semaphore",
    "state",
    "timeout",
    "timeout.per_attempt",
    "timeout.total",
    "weight",
    "write",
];

/// The words that are read and checked to the last key, and then refused, because nothing enforces them yet. The
/// change that makes one work deletes its line.
pub const NOT_YET: &[&str] = &["capabilities.http", "circuit_breaker", "kind", "rate_limit", "timeout.total"];

/// Whether this version enforces a word of the format.
pub(crate) fn enforced(word: &str) -> bool {
    VOCABULARY.contains(&word) && !NOT_YET.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_enforced_is_a_word_of_the_format() {
        for word in NOT_YET {
            assert!(VOCABULARY.contains(word), "`{word}` is misspelt in one of the two tables");
            assert!(!enforced(word));
        }
        assert!(enforced("mutex") && !enforced("quantum"));
    }
}
