//! Values as rows hold them.

use std::borrow::Cow;

use warp_store::StoreErrorKind;

use crate::error::Fault;

/// Metadata as its column holds it: JSON pairs in order, or nothing.
pub(crate) fn write_metadata(metadata: &[(String, String)]) -> Option<String> {
    (!metadata.is_empty()).then(|| serde_json::to_string(metadata).unwrap_or_default())
}

/// Reads what [`write_metadata`] wrote.
pub(crate) fn read_metadata(text: Option<&str>) -> Result<Vec<(String, String)>, Fault> {
    let Some(text) = text else { return Ok(Vec::new()) };
    serde_json::from_str(text).map_err(|error| Fault::said(StoreErrorKind::Internal, format!("metadata of a job: {error}")))
}

/// Text that PostgreSQL can store: a NUL character, which it cannot, is shown as a replacement character.
pub(crate) fn without_nul(text: &str) -> String {
    let text: Cow<'_, str> = if text.contains('\0') { text.replace('\0', "\u{fffd}").into() } else { text.into() };
    text.into_owned()
}
