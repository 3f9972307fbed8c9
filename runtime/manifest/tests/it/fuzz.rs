//! Whatever a plugins directory holds, nothing panics, and equal bytes get equal answers.

use proptest::prelude::*;
use warp_manifest::{HostWorld, Manifest, check_imports, load, pack, read, surface};

use crate::component::{TEXT, plain};

fn never_panics(bytes: &[u8], sidecar: Option<&str>) {
    let again = read(bytes);
    assert_eq!(read(bytes), again);
    let _ = pack(bytes, TEXT).map(|packed| assert_eq!(read(&packed), Ok(Some(TEXT)), "what pack accepts, read must find"));
    let _ = surface(bytes);
    if let Ok(loaded) = load("p", bytes, sidecar) {
        let _ = check_imports("p.wasm", &loaded.surface, &loaded.manifest, &HostWorld::default());
    }
}

#[test]
fn every_truncation_of_a_packed_component_is_refused_or_lacks_its_manifest() {
    let packed = pack(&plain(), TEXT).expect("packs");
    for length in 0..packed.len() {
        never_panics(&packed[..length], None);
        assert!(!matches!(read(&packed[..length]), Ok(Some(_))), "a manifest was found in {length} of {} bytes", packed.len());
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        never_panics(&bytes, Some(TEXT));
    }

    /// Behind a sound header, so that the sections themselves are reached.
    #[test]
    fn arbitrary_sections(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        never_panics(&[&plain()[..8], &bytes].concat(), None);
    }

    #[test]
    fn a_packed_component_with_damaged_bytes(damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = pack(&plain(), TEXT).expect("packs");
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        never_panics(&bytes, None);
    }

    #[test]
    fn arbitrary_text(text in any::<String>()) {
        let _ = Manifest::parse(&text, "p.toml");
    }

    /// Lines of real manifests, shuffled, cut and repeated: most of the reader is reached by these.
    #[test]
    fn pieces_of_manifests(pieces in proptest::collection::vec((0usize..PIECES.len(), any::<bool>()), 0..24)) {
        let mut text = String::from("format = 1\n");
        for (at, cut) in pieces {
            let piece = PIECES[at];
            text.push_str(if cut { &piece[..piece.len() / 2] } else { piece });
            text.push('\n');
        }
        match Manifest::parse(&text, "p.toml") {
            Ok(manifest) => prop_assert!(!manifest.handlers.is_empty()),
            Err(refusals) => prop_assert!(!refusals.is_empty()),
        }
    }
}

const PIECES: &[&str] = &[
    "[plugin]\nname = \"p\"\nversion = \"1\"",
    "must_understand = [\"order\", \"later\"]",
    "[contract.a]",
    "[handler.a]",
    "[handler.b]\nhandles = [\"a\", \"b\"]",
    "mutex = { key = \"k:{a.b[0]}\", mode = \"wait\", order = \"fifo\", on_retry = \"pass\" }",
    "semaphore = { keys = [\"x\", \"y\"], limit = 5, weight = 3 }",
    "semaphore = { key = \"k:{a.b[0]}\", limit = 0 }",
    "retry = { max = 3, delays = [\"15s\", \"1m\"], jitter = 0.1 }",
    "timeout = { per_attempt = \"30s\", total = \"1h\", mode = \"delete\" }",
    "rate_limit = { key = \"k\", count = 1, per = \"1m\", style = \"sliding\" }",
    "circuit_breaker = { group = \"g\" }",
    "kind = \"request\"",
    "[capabilities]",
    "files = [{ path = \"in\", mode = \"read\" }]",
    "state = [{ bucket = \"b\", write = \"under-mutex\" }]",
    "env = [\"A\", \"A\"]",
    "memory = \"1GiB\"",
    "mutex.key = \"z\"",
    "[[handler]]",
];
