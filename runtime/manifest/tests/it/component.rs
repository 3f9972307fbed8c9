//! The component file: packing, reading back, and everything that is wrong with a file.

use warp_manifest::{
    ComponentError, HostWorld, Interface, MAX_MANIFEST_BYTES, Manifest, SECTION, check_imports, load, pack, read, surface,
};
use wasm_encoder::{
    Component, ComponentExportKind, ComponentExportSection, ComponentImportSection, ComponentTypeRef, ComponentTypeSection, CustomSection,
    InstanceType, Module, ModuleSection, NestedComponentSection, TypeBounds,
};

pub(crate) const TEXT: &str = "format = 1\n\n[plugin]\nname = \"p\"\nversion = \"1\"\n\n[handler.h]\n";

fn custom(data: &[u8]) -> CustomSection<'_> {
    CustomSection { name: SECTION.into(), data: data.into() }
}

/// A component with this surface. It is enough of one for a walk over its sections; no engine would link it.
pub(crate) fn component(imports: &[&str], functions: &[&str]) -> Component {
    let mut types = ComponentTypeSection::new();
    types.instance(&InstanceType::new());
    let mut import_section = ComponentImportSection::new();
    for import in imports {
        import_section.import(*import, ComponentTypeRef::Instance(0));
    }
    import_section.import("attempt", ComponentTypeRef::Type(TypeBounds::Eq(0)));
    let mut exports = ComponentExportSection::new();
    for (at, name) in functions.iter().enumerate() {
        exports.export(*name, ComponentExportKind::Func, u32::try_from(at).expect("few"), None);
    }
    let mut component = Component::new();
    component.section(&types).section(&import_section).section(&ModuleSection(&Module::new())).section(&exports);
    component
}

pub(crate) fn plain() -> Vec<u8> {
    component(&["warp:job/log@1.0.0"], &["handle"]).finish()
}

#[test]
fn what_is_packed_reads_back_and_stands_last() {
    let before = plain();
    let packed = pack(&before, TEXT).expect("packs");
    assert_eq!(packed, pack(&before, TEXT).expect("packs"), "packing is not deterministic");
    assert!(packed.starts_with(&before) && packed.ends_with(TEXT.as_bytes()), "the section is not the last thing in the file");
    assert_eq!(read(&packed), Ok(Some(TEXT)));
    assert_eq!(read(&before), Ok(None));
    assert_eq!(surface(&packed), surface(&before), "packing changed what the component shows");
    let by_encoder = { component(&["warp:job/log@1.0.0"], &["handle"]).section(&custom(TEXT.as_bytes())).clone().finish() };
    assert_eq!(packed, by_encoder);
}

#[test]
fn the_surface_is_that_of_the_top_level() {
    let inner = component(&["inner:thing/x@3.0.0"], &["inner"]);
    let mut outer = component(&["warp:job/log@1.0.0", "wasi:cli/stdout@0.2.3", "odd"], &["handle", "other"]);
    outer.section(&NestedComponentSection(&inner));
    let surface = surface(&outer.finish()).expect("a component");
    let imports: Vec<_> = surface.imports.iter().map(ToString::to_string).collect();
    assert_eq!(imports, ["warp:job/log@1.0.0", "wasi:cli/stdout@0.2.3", "odd"]);
    assert_eq!(surface.imports[0], Interface { package: "warp:job".into(), name: "log".into(), version: "1.0.0".into() });
    assert_eq!(surface.functions, ["handle", "other"]);
}

#[test]
fn every_bad_file_is_told_apart() {
    let packed = pack(&plain(), TEXT).expect("packs");
    let in_module = {
        let mut module = Module::new();
        module.section(&custom(TEXT.as_bytes()));
        component(&[], &["handle"]).section(&ModuleSection(&module)).clone().finish()
    };
    let in_component = {
        let mut inner = Component::new();
        inner.section(&custom(TEXT.as_bytes()));
        component(&[], &["handle"]).section(&NestedComponentSection(&inner)).clone().finish()
    };
    let nested_beside_a_good_one = [in_module.as_slice(), &packed[plain().len()..]].concat();
    let twice = [packed.as_slice(), &packed[plain().len()..]].concat();
    let not_text = component(&[], &["handle"]).section(&custom(b"format = \xff")).clone().finish();
    let too_large = component(&[], &["handle"]).section(&custom(&vec![b'#'; MAX_MANIFEST_BYTES + 1])).clone().finish();
    let garbage = [packed.as_slice(), b"<html>"].concat();
    let zeros = [packed.as_slice(), &[0; 16]].concat();
    let at = packed.len();
    let nested = "the file holds a `warp:manifest` section inside a nested module or component, where nobody reviews it; \
                  remove it there, and run `warp-host pack` on the finished component";
    let cases: &[(&str, &[u8], &str)] = &[
        ("empty", b"", "the file is empty; build it again, or wait until it has been copied"),
        ("text", b"<!doctype html>", "the file is not WebAssembly; drop the `.wasm` that the build of a component writes"),
        (
            "core module",
            &Module::new().finish(),
            "the file is a core module, not a component; build for `wasm32-wasip2`, or run `wasm-tools component new`",
        ),
        (
            "three bytes",
            &packed[..3],
            "the file ends in the middle of a section, after 3 bytes; copy it again, and rename it into place when it is whole",
        ),
        (
            "one byte short",
            &packed[..at - 1],
            &format!(
                "the file ends in the middle of a section, after {} bytes; copy it again, and rename it into place when it is whole",
                at - 1
            ),
        ),
        (
            "garbage behind",
            &garbage,
            &format!(
                "byte {at} is not the start or part of a valid section (there is no section of kind 60); build or copy the file again"
            ),
        ),
        (
            "zeros behind",
            &zeros,
            &format!("byte {} is not the start or part of a valid section (unexpected end-of-file); build or copy the file again", at + 2),
        ),
        (
            "two sections",
            &twice,
            "the file holds two `warp:manifest` sections; take the file that the build wrote and run `warp-host pack` once",
        ),
        ("in a module", &in_module, nested),
        ("in a component", &in_component, nested),
        ("nested beside a good one", &nested_beside_a_good_one, nested),
        (
            "not text",
            &not_text,
            "the `warp:manifest` section is not UTF-8 from its byte 9 on; save the manifest as UTF-8 and run `warp-host pack` again",
        ),
        ("too large", &too_large, "the manifest has 65537 bytes; keep it within 65536"),
    ];
    for (name, bytes, expected) in cases {
        assert_eq!(read(bytes).expect_err(name).to_string(), *expected, "{name}");
        let refusals = load("plugins/p", bytes, Some(TEXT)).expect_err(name);
        let printed: Vec<_> = refusals.iter().map(ToString::to_string).collect();
        assert_eq!(printed, [format!("plugins/p.wasm: {expected}")], "{name}");
    }
}

/// At the end of the file a parser that is told "there is no more" closes every level, as if the file were whole.
#[test]
fn a_file_cut_inside_a_nested_module_is_truncated_wherever_the_cut_falls() {
    let mut module = Module::new();
    module.section(&CustomSection { name: "a".into(), data: (&[1, 2][..]).into() });
    module.section(&CustomSection { name: "b".into(), data: (&[3, 4][..]).into() });
    let whole = component(&[], &["handle"]).section(&ModuleSection(&module)).clone().finish();
    let nested = module.finish().len();
    assert_eq!(read(&whole), Ok(None));
    for length in whole.len() - nested - 1..whole.len() {
        assert_eq!(read(&whole[..length]), Err(ComponentError::Truncated { bytes: length }), "cut to {length} of {}", whole.len());
    }
}

#[test]
fn endless_nesting_is_refused() {
    let nested =
        |depth: usize| (0..depth).fold(Component::new(), |inner, _| Component::new().section(&NestedComponentSection(&inner)).clone());
    assert_eq!(read(&nested(100).finish()), Ok(None));
    let error = read(&nested(101).finish()).expect_err("too deep").to_string();
    assert!(error.contains("nested more than 100 deep"), "{error}");
}

#[test]
fn pack_refuses_what_would_not_load() {
    let packed = pack(&plain(), TEXT).expect("packs");
    assert_eq!(pack(&packed, TEXT), Err(ComponentError::AlreadyPacked));
    assert_eq!(pack(&Module::new().finish(), TEXT), Err(ComponentError::CoreModule));
    assert_eq!(pack(&packed[..packed.len() - 1], TEXT), Err(ComponentError::Truncated { bytes: packed.len() - 1 }));
    let long = "#".repeat(MAX_MANIFEST_BYTES + 1);
    assert_eq!(pack(&plain(), &long), Err(ComponentError::TooLarge { bytes: MAX_MANIFEST_BYTES + 1 }));
    assert!(pack(&plain(), &long[1..]).is_ok(), "the limit itself is allowed");
}

fn refused(bytes: &[u8], sidecar: Option<&str>) -> Vec<String> {
    load("p", bytes, sidecar).expect_err("refused").iter().map(ToString::to_string).collect()
}

#[test]
fn section_and_sidecar() {
    let (bare, packed) = (plain(), pack(&plain(), TEXT).expect("packs"));
    let by_section = load("p", &packed, None).expect("loads");
    let with_equal = load("p", &packed, Some(TEXT)).expect("loads");
    let by_sidecar = load("p", &bare, Some(TEXT)).expect("loads");
    let by_other = load("p", &bare, Some(&TEXT.replace("\"1\"", "\"2\""))).expect("loads");
    assert_eq!(by_section.manifest.file, "p.wasm (warp:manifest)");
    assert_eq!(by_sidecar.manifest.file, "p.toml");
    assert_eq!(with_equal.digest, by_section.digest, "an equal sidecar is no new version");
    assert_ne!(by_sidecar.digest, by_other.digest, "the sidecar decides, so it counts");
    assert_ne!(by_sidecar.digest, by_section.digest);
    let hash = |bytes: &[u8]| warp_domain::Digest(<sha2::Sha256 as sha2::Digest>::digest(bytes).into());
    assert_eq!(by_section.digest, hash(&packed));
    assert_eq!(by_sidecar.digest, hash(&[bare.as_slice(), TEXT.as_bytes()].concat()));
    let declared = by_section.manifest.declarations(by_section.digest);
    assert_eq!((declared.len(), declared[0].digest), (1, by_section.digest));

    assert_eq!(
        refused(&bare, None),
        ["p.wasm: the component carries no manifest, and there is no `p.toml` beside it; run `warp-host pack` on it as the last step \
          of the build: `wasm-tools strip` removes what was packed before"]
    );
    assert_eq!(
        refused(&packed, Some(&TEXT.replace("\"1\"", "\"2\""))),
        ["p.toml:5:12: differs from the manifest packed into `p.wasm`, so one of the two was not reviewed with this code; remove it, \
          or pack it into the component that the build wrote"]
    );
    let broken = pack(&bare, "format = 1\n[plugin]\n").expect("packing does not judge the text");
    assert_eq!(refused(&broken, None)[0].split(": ").next(), Some("p.wasm (warp:manifest)"), "a refusal names the section");
}

#[test]
fn imports_are_compared_with_what_the_host_offers() {
    let world = HostWorld::of(&["warp:job/types@1.0.0", "warp:job/log@1.0.0", "warp:job/state@1.0.0", "wasi:cli/stdout@0.2.6"]);
    let manifest = Manifest::parse(TEXT, "p.toml").expect("good");
    let check = |imports: &[&str], functions: &[&str]| -> Vec<String> {
        let surface = surface(&component(imports, functions).finish()).expect("a component");
        check_imports("p.wasm", &surface, &manifest, &world).iter().map(ToString::to_string).collect()
    };
    let good: [&str; 0] = [];
    assert_eq!(check(&["warp:job/types@1.0.0", "warp:job/log@1.2.0", "wasi:cli/stdout@0.2.3"], &["handle"]), good);
    for (import, expected) in [
        (
            "warp:job/log@2.0.0",
            "p.wasm: the plugin imports `warp:job/log@2.0.0`, this host offers `warp:job@1.0.0`; build it against that version, or load it \
             into a host of the other",
        ),
        (
            "warp:job/streams@2.1.0",
            "p.wasm: the plugin imports `warp:job/streams@2.1.0`, this host offers `warp:job@1.0.0`; build it against that version, or load \
             it into a host of the other",
        ),
        (
            "warp:job/batches@1.4.0",
            "p.wasm: the plugin imports `warp:job/batches@1.4.0`, and `warp:job@1.0.0` of this host has no such interface; build it without \
             that import, or load it into a newer host",
        ),
        (
            "wasi:sockets/tcp@0.2.3",
            "p.wasm: the plugin imports `wasi:sockets/tcp@0.2.3`, and this host offers nothing of `wasi:sockets`; build it without that \
             import; `warp-host wit` prints what a handler may import",
        ),
        (
            "wasi:cli/stdout@0.3.0",
            "p.wasm: the plugin imports `wasi:cli/stdout@0.3.0`, this host offers `wasi:cli@0.2.6`; build it against that version, or load it \
             into a host of the other",
        ),
        (
            "wasi:http/outgoing-handler@0.2.3",
            "p.wasm: the plugin imports `wasi:http/outgoing-handler@0.2.3`, and requests to the network are not supported by this version \
             (warp-host 0.1.0); build it without an HTTP client",
        ),
        (
            "warp:job/state@1.0.0",
            "p.wasm: the plugin imports `warp:job/state@1.0.0`, and its manifest asks for no bucket; add `state = [{ bucket = \"…\" }]` to \
             `[capabilities]`, or build against the world `handler`",
        ),
    ] {
        assert_eq!(check(&[import], &["handle"]), [expected]);
    }
    assert_eq!(
        check(&["warp:job/log@2.0.0", "warp:job/jobs@2.0.0", "warp:job/log@3.0.0", "a:b/c@1.0.0", "a:b/d@1.0.0"], &["handle"]).len(),
        3,
        "what concerns a whole package is said once for each version"
    );
    assert_eq!(check(&["warp:job/batches@1.0.0", "warp:job/sagas@1.0.0"], &["handle"]).len(), 2);
    assert_eq!(
        check(&[], &["handle-it"]),
        [
            "p.wasm: the component exports no function `handle`; build it against the world `handler` of `warp:job@1.0.0`, which `warp-host wit` \
          prints"
        ]
    );
}

#[test]
fn state_is_offered_to_a_manifest_that_asks_for_a_bucket() {
    let world = HostWorld::of(&["warp:job/state@1.0.0"]);
    let asking = Manifest::parse(&format!("{TEXT}\n[capabilities]\nstate = [{{ bucket = \"b\" }}]\n"), "p.toml").expect("good");
    let surface = surface(&component(&["warp:job/state@1.0.0"], &["handle"]).finish()).expect("a component");
    assert_eq!(check_imports("p.wasm", &surface, &asking, &world), []);
}
