//! The last step of every build: the manifest becomes a part of the component, as `warp-host pack` would make it.

use anyhow::{Context, Result, bail};
use warp_manifest::Manifest;

/// Refuses a manifest that a host would refuse, and what is no sound component.
pub fn pack(component: &[u8], manifest: &str, manifest_file: &str) -> Result<Vec<u8>> {
    if let Err(refusals) = Manifest::parse(manifest, manifest_file) {
        let lines: Vec<_> = refusals.iter().map(ToString::to_string).collect();
        bail!("{}", lines.join("\n"));
    }
    warp_manifest::pack(component, manifest).context("the build's result cannot be packed")
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";
    const GOOD: &str = "format = 1\n[plugin]\nname = \"a\"\nversion = \"1.0.0\"\n[contract.a]\n[handler.a]\n";

    #[test]
    fn a_manifest_that_a_host_would_refuse_is_refused_here() {
        assert!(pack(EMPTY_COMPONENT, GOOD, "a/warp.toml").is_ok());
        let refused = pack(EMPTY_COMPONENT, &GOOD.replace("handler", "handlers"), "a/warp.toml").expect_err("no such table");
        assert!(refused.to_string().contains("a/warp.toml:6:2: handlers: unknown key"), "{refused}");
        assert!(pack(b"rubbish", GOOD, "a/warp.toml").is_err());
    }
}
