//! The last step of every build: the manifest becomes a part of the component.
//!
//! As a custom section appended at the end it works for every toolchain alike, and it is outside all nested modules,
//! where a reader does not have to look for it.

use anyhow::{Context, Result, bail};
use wasmparser::{Encoding, Parser, Payload, Validator, WasmFeatures};

const SECTION: &str = "warp:manifest";
const CUSTOM_SECTION_ID: u8 = 0;

/// Refuses what is no valid component, and one that carries a manifest already, nested ones included.
pub fn pack(component: &[u8], manifest: &str) -> Result<Vec<u8>> {
    Validator::new_with_features(WasmFeatures::all()).validate_all(component).context("the build produced no valid component")?;
    for payload in Parser::new(0).parse_all(component) {
        match payload? {
            Payload::Version { encoding: Encoding::Module, range, .. } if range.start == 0 => {
                bail!("the build produced a core module, not a component")
            }
            Payload::CustomSection(section) if section.name() == SECTION => bail!("the component has a section {SECTION} already"),
            _ => {}
        }
    }
    let mut content = leb128(SECTION.len());
    content.extend(SECTION.as_bytes());
    content.extend(manifest.as_bytes());

    let mut packed = component.to_vec();
    packed.push(CUSTOM_SECTION_ID);
    packed.extend(leb128(content.len()));
    packed.extend(content);
    Ok(packed)
}

fn leb128(mut value: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";
    const EMPTY_MODULE: &[u8] = b"\0asm\x01\0\0\0";

    #[test]
    fn what_is_packed_can_be_read_back() {
        // Lengths around the point where the length itself grows by a byte.
        for len in [0, 1, 113, 114, 127, 128, 20_000] {
            let manifest = "x".repeat(len);
            let packed = pack(EMPTY_COMPONENT, &manifest).unwrap();
            Validator::new_with_features(WasmFeatures::all()).validate_all(&packed).unwrap();
            let sections: Vec<_> = Parser::new(0)
                .parse_all(&packed)
                .filter_map(|payload| match payload.unwrap() {
                    Payload::CustomSection(section) => Some((section.name(), section.data())),
                    _ => None,
                })
                .collect();
            assert_eq!(sections, [(SECTION, manifest.as_bytes())]);
        }
    }

    #[test]
    fn refuses_a_second_manifest_a_module_and_rubbish() {
        let once = pack(EMPTY_COMPONENT, "a").unwrap();
        assert!(pack(&once, "b").unwrap_err().to_string().contains("already"));
        assert!(pack(EMPTY_MODULE, "a").unwrap_err().to_string().contains("core module"));
        assert!(pack(b"rubbish", "a").is_err());
    }
}
