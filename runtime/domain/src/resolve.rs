//! Which declaration of a family wins.
//!
//! One chain for every family, whole family at a time and never merged: explicit at enqueue → handler →
//! contract. (The global default, the fourth rung of retry and timeout, is applied live by the worker and is
//! never stamped.) It is called when a job is first claimed; its answer goes on the row.

use crate::id::Digest;
use crate::policy::{Declared, Source, Stamp, Stamped};

/// What a plugin version says about one contract: the contract's own declarations and its handler's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Declarations {
    /// The contract.
    pub contract: String,
    /// The handler that runs it.
    pub handler: String,
    /// The plugin version that both were read from.
    pub digest: Digest,
    /// Declared on the contract.
    pub on_contract: Declared,
    /// Declared on the handler.
    pub on_handler: Declared,
}

/// The policy that a job with these explicit declarations follows from now on.
#[must_use]
pub fn resolve(at_enqueue: &Declared, declarations: &Declarations) -> Stamp {
    fn pick<T: Clone>(at_enqueue: &Declared, from: &Declarations, family: fn(&Declared) -> &Option<T>) -> Option<Stamped<T>> {
        let rungs = [
            (family(at_enqueue), Source::Enqueue),
            (family(&from.on_handler), Source::Handler { name: from.handler.clone(), digest: from.digest }),
            (family(&from.on_contract), Source::Contract { name: from.contract.clone(), digest: from.digest }),
        ];
        rungs.into_iter().find_map(|(declared, source)| declared.clone().map(|value| Stamped { value, source }))
    }
    Stamp {
        concurrency: pick(at_enqueue, declarations, |declared| &declared.concurrency),
        retry: pick(at_enqueue, declarations, |declared| &declared.retry),
        timeout: pick(at_enqueue, declarations, |declared| &declared.timeout),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::{Retry, Timeout, TimeoutMode};

    fn retry(max: u32) -> Option<Retry> {
        Some(Retry { max, delays: vec![Duration::from_secs(u64::from(max))], jitter_permille: 0 })
    }

    fn timeout(seconds: u64) -> Option<Timeout> {
        Some(Timeout { per_attempt: Duration::from_secs(seconds), mode: TimeoutMode::Fail })
    }

    /// Every pair of rungs, for two families at once, so that a merge across families or rungs would show.
    #[test]
    fn the_highest_rung_wins_whole_families_and_nothing_merges() {
        let digest = Digest([7; 32]);
        let handler = Source::Handler { name: "h".into(), digest };
        let contract = Source::Contract { name: "c".into(), digest };
        for bits in 0u8..8 {
            let (e, h, c) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            let at_enqueue = Declared { retry: e.then(|| retry(1)).flatten(), ..Declared::default() };
            let declarations = Declarations {
                contract: "c".into(),
                handler: "h".into(),
                digest,
                on_handler: Declared { retry: h.then(|| retry(2)).flatten(), ..Declared::default() },
                on_contract: Declared { retry: c.then(|| retry(3)).flatten(), timeout: timeout(9), ..Declared::default() },
            };
            let stamp = resolve(&at_enqueue, &declarations);
            let expected = match (e, h, c) {
                (true, _, _) => Some((1, Source::Enqueue)),
                (_, true, _) => Some((2, handler.clone())),
                (_, _, true) => Some((3, contract.clone())),
                _ => None,
            };
            let got = stamp.retry.map(|won| {
                assert_eq!(won.value.delays, [Duration::from_secs(u64::from(won.value.max))], "fields of two rungs were mixed");
                (won.value.max, won.source)
            });
            assert_eq!(got, expected, "enqueue {e}, handler {h}, contract {c}");
            assert_eq!(stamp.timeout.expect("declared on the contract only").source, contract);
        }
    }
}
