//! The component file: its manifest section, and what it imports and exports.
//!
//! What must stay true: the file is walked section by section with wasmparser before anything compiles it. A
//! manifest that counts is one custom section at the top level; one inside a nested module or component is never
//! read, because whoever composes components does not review what their parts declare.
//!
//! What it deliberately does not do: validate code or types. The engine does that when it compiles.

use wasm_encoder::Encode;
use wasmparser::{Chunk, ComponentExternalKind, ComponentTypeRef, Encoding, Parser, Payload};

/// The name of the custom section that holds the manifest's text.
pub const SECTION: &str = "warp:manifest";
/// The longest manifest, in bytes, packed or beside the file.
pub const MAX_MANIFEST_BYTES: usize = 64 << 10;
/// The highest kind of section that a component may have.
const LAST_SECTION: u8 = 12;
/// Nesting beyond this is refused; the engine allows less.
const DEEPEST: usize = 100;

/// Why a file is no component that carries its manifest rightly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComponentError {
    /// No bytes at all.
    #[error("the file is empty; build it again, or wait until it has been copied")]
    Empty,
    /// Not WebAssembly of any kind.
    #[error("the file is not WebAssembly; drop the `.wasm` that the build of a component writes")]
    NotWasm,
    /// A module, not a component.
    #[error("the file is a core module, not a component; build for `wasm32-wasip2`, or run `wasm-tools component new`")]
    CoreModule,
    /// The file ends inside a section.
    #[error("the file ends in the middle of a section, after {bytes} bytes; copy it again, and rename it into place when it is whole")]
    Truncated {
        /// How many bytes there are.
        bytes: usize,
    },
    /// Bytes that are no section: damage, or garbage behind the end.
    #[error("byte {offset} is not the start or part of a valid section ({message}); build or copy the file again")]
    Malformed {
        /// Where.
        offset: u64,
        /// What the parser said.
        message: String,
    },
    /// Two sections at the top level.
    #[error("the file holds two `{SECTION}` sections; take the file that the build wrote and run `warp-host pack` once")]
    TwoSections,
    /// A section inside a nested module or component.
    #[error(
        "the file holds a `{SECTION}` section inside a nested module or component, where nobody reviews it; remove it there, \
         and run `warp-host pack` on the finished component"
    )]
    Nested,
    /// The section is not text.
    #[error("the `{SECTION}` section is not UTF-8 from its byte {valid} on; save the manifest as UTF-8 and run `warp-host pack` again")]
    NotUtf8 {
        /// How many bytes are text.
        valid: usize,
    },
    /// The section, or the text to pack, is too long.
    #[error("the manifest has {bytes} bytes; keep it within {MAX_MANIFEST_BYTES}")]
    TooLarge {
        /// How long it is.
        bytes: usize,
    },
    /// `pack` on a file that is packed.
    #[error("the file holds a `{SECTION}` section already; pack the file that the build wrote, not one that was packed")]
    AlreadyPacked,
}

/// An instance that a component imports, such as `warp:job/log@1.0.0`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interface {
    /// `warp:job`.
    pub package: String,
    /// `log`.
    pub name: String,
    /// `1.0.0`; empty where the import carries none.
    pub version: String,
}

impl Interface {
    /// Reads `package/name@version`. A name of any other form becomes a package without an interface, so that
    /// nothing offers it.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let (path, version) = text.split_once('@').unwrap_or((text, ""));
        let (package, name) = path.split_once('/').unwrap_or((path, ""));
        Interface { package: package.to_owned(), name: name.to_owned(), version: version.to_owned() }
    }
}

impl std::fmt::Display for Interface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.package)?;
        if !self.name.is_empty() {
            write!(f, "/{}", self.name)?;
        }
        if !self.version.is_empty() {
            write!(f, "@{}", self.version)?;
        }
        Ok(())
    }
}

/// What a component shows at its top level.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surface {
    /// Interfaces and functions that it needs, in the order of the file. Imported types are no need of their own.
    pub imports: Vec<Interface>,
    /// Functions that it exports, by name.
    pub functions: Vec<String>,
    /// Interfaces that it exports.
    pub interfaces: Vec<Interface>,
}

/// Puts a manifest's text into a component, as its last top-level section. Equal input gives equal output.
///
/// The text is not judged here: call [`crate::Manifest::parse`] first, which knows the file's name.
///
/// # Errors
/// When the file is no sound component, is packed already, or the text is too long.
pub fn pack(component: &[u8], manifest_text: &str) -> Result<Vec<u8>, ComponentError> {
    if manifest_text.len() > MAX_MANIFEST_BYTES {
        return Err(ComponentError::TooLarge { bytes: manifest_text.len() });
    }
    let walked = walk(component)?;
    if !walked.sections.is_empty() {
        return Err(ComponentError::AlreadyPacked);
    }
    if walked.nested {
        return Err(ComponentError::Nested);
    }
    let mut packed = Vec::with_capacity(component.len() + manifest_text.len() + 32);
    packed.extend_from_slice(component);
    // Section id 0, then length, name and text: the encoder's `Encode` writes the length, not the id.
    packed.push(0);
    wasm_encoder::CustomSection { name: SECTION.into(), data: manifest_text.as_bytes().into() }.encode(&mut packed);
    Ok(packed)
}

/// The manifest's text inside a component; `None` when it carries none.
///
/// # Errors
/// When the file is no sound component or carries its manifest wrongly.
pub fn read(component: &[u8]) -> Result<Option<&str>, ComponentError> {
    text_of(&walk(component)?)
}

/// What the component imports and exports.
///
/// # Errors
/// When the file is no sound component.
pub fn surface(component: &[u8]) -> Result<Surface, ComponentError> {
    Ok(walk(component)?.surface)
}

pub(crate) fn read_with_surface(component: &[u8]) -> Result<(Option<&str>, Surface), ComponentError> {
    let walked = walk(component)?;
    Ok((text_of(&walked)?, walked.surface))
}

fn text_of<'b>(walked: &Walked<'b>) -> Result<Option<&'b str>, ComponentError> {
    let section = match walked.sections.as_slice() {
        [_, _, ..] => return Err(ComponentError::TwoSections),
        _ if walked.nested => return Err(ComponentError::Nested),
        [] => return Ok(None),
        [one] => *one,
    };
    if section.len() > MAX_MANIFEST_BYTES {
        return Err(ComponentError::TooLarge { bytes: section.len() });
    }
    std::str::from_utf8(section).map(Some).map_err(|error| ComponentError::NotUtf8 { valid: error.valid_up_to() })
}

#[derive(Default)]
struct Walked<'b> {
    sections: Vec<&'b [u8]>,
    nested: bool,
    surface: Surface,
}

/// Goes through every section once. Costs one pass over the headers; code is stepped over body by body.
fn walk(bytes: &[u8]) -> Result<Walked<'_>, ComponentError> {
    if bytes.is_empty() {
        return Err(ComponentError::Empty);
    }
    if !bytes.starts_with(&b"\0asm"[..bytes.len().min(4)]) {
        return Err(ComponentError::NotWasm);
    }
    let malformed = |error: wasmparser::BinaryReaderError| ComponentError::Malformed {
        offset: error.offset() as u64,
        message: crate::text::shown(error.message()),
    };
    let mut walked = Walked::default();
    let truncated = ComponentError::Truncated { bytes: bytes.len() };
    let mut parser = Parser::new(0);
    let mut end = bytes.len();
    let mut outer: Vec<(Parser, usize)> = Vec::new();
    let mut rest = bytes;
    loop {
        // A component has no code of its own, so at the top level every step but the first begins a section. Told
        // apart here, garbage behind the end is not mistaken for a section that is cut off.
        if let (true, Some(&kind)) = (outer.is_empty() && rest.len() < bytes.len(), rest.first().filter(|kind| **kind > LAST_SECTION)) {
            let offset = (bytes.len() - rest.len()) as u64;
            return Err(ComponentError::Malformed { offset, message: format!("there is no section of kind {kind}") });
        }
        // Only at the end of its own level may a section be missing; told so earlier, the parser could not say
        // "truncated", and at the end of the file it would close every level as if nothing were missing.
        let at_end = bytes.len() - rest.len() == end;
        let Chunk::Parsed { consumed, payload } = parser.parse(rest, at_end).map_err(malformed)? else {
            return Err(truncated);
        };
        let Some(behind) = rest.get(consumed..) else { return Err(truncated) };
        rest = behind;
        match payload {
            Payload::Version { encoding: Encoding::Module, .. } if outer.is_empty() => return Err(ComponentError::CoreModule),
            Payload::CustomSection(custom) if custom.name() == SECTION => match outer.len() {
                0 => walked.sections.push(custom.data()),
                _ => walked.nested = true,
            },
            Payload::ComponentImportSection(imports) if outer.is_empty() => {
                for import in imports {
                    let import = import.map_err(malformed)?;
                    if !matches!(import.ty, ComponentTypeRef::Type(_)) {
                        walked.surface.imports.push(Interface::parse(import.name.name));
                    }
                }
            }
            Payload::ComponentExportSection(exports) if outer.is_empty() => {
                for export in exports {
                    let export = export.map_err(malformed)?;
                    match export.kind {
                        ComponentExternalKind::Func => walked.surface.functions.push(export.name.name.to_owned()),
                        ComponentExternalKind::Instance => walked.surface.interfaces.push(Interface::parse(export.name.name)),
                        _ => {}
                    }
                }
            }
            Payload::ModuleSection { parser: inner, unchecked_range } | Payload::ComponentSection { parser: inner, unchecked_range } => {
                if unchecked_range.end > end {
                    return Err(truncated);
                }
                if outer.len() == DEEPEST {
                    let offset = (bytes.len() - rest.len()) as u64;
                    return Err(ComponentError::Malformed { offset, message: format!("nested more than {DEEPEST} deep") });
                }
                outer.push((std::mem::replace(&mut parser, inner), std::mem::replace(&mut end, unchecked_range.end)));
            }
            Payload::End(_) => match outer.pop() {
                Some(around) => (parser, end) = around,
                None => return Ok(walked),
            },
            _ => {}
        }
    }
}
