//! The payload, checked. What leaves this module can be acted on without a further look.

use serde::Deserialize;

/// Larger pictures are not thumbnails, and the scaler's buffers grow with them beside the whole source.
const MAX_SIDE: u32 = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Png,
    Jpeg,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Request {
    /// A file below the folder `in`.
    pub source: String,
    /// A file below the folder `out`. Folders on the way are created.
    pub target: String,
    /// The box that the result fits into.
    pub width: u32,
    pub height: u32,
    pub format: Format,
}

impl Request {
    /// The error says which field is wrong and why; it becomes the text of a permanent failure.
    pub fn parse(payload: &str) -> Result<Self, String> {
        let request: Self = serde_json::from_str(payload).map_err(|e| format!("failed to read the payload: {e}"))?;
        inside("source", &request.source)?;
        inside("target", &request.target)?;
        side("width", request.width)?;
        side("height", request.height)?;
        Ok(request)
    }
}

fn side(field: &str, value: u32) -> Result<(), String> {
    if !(1..=MAX_SIDE).contains(&value) {
        return Err(format!("{field} is {value}, but must be 1 to {MAX_SIDE}"));
    }
    Ok(())
}

/// The host refuses a path that leaves the folder anyway. Checked here too, so that the failure names the field.
fn inside(field: &str, path: &str) -> Result<(), String> {
    let bad = |why: &str| Err(format!("{field} {path:?} {why}"));
    if path.is_empty() {
        return bad("is empty");
    }
    if path.starts_with('/') || path.contains('\\') || path.contains('\0') {
        return bad("must be a relative path with forward slashes");
    }
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return bad("must not contain empty parts, \".\" or \"..\"");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(source: &str, width: &str, format: &str) -> String {
        format!(r#"{{"source":{source:?},"target":"small.png","width":{width},"height":90,"format":{format:?}}}"#)
    }

    #[test]
    fn a_good_payload_is_taken_and_unknown_fields_are_left_alone() {
        let text = r#"{"source":"a/b.png","target":"c.jpg","width":160,"height":120,"format":"jpeg","tenant":7}"#;
        let request = Request::parse(text).unwrap();
        assert_eq!(request.format, Format::Jpeg);
        assert_eq!((request.width, request.height), (160, 120));
    }

    #[test]
    fn every_refusal_names_its_field() {
        for (text, says) in [
            (payload("../secret.png", "1", "png"), "source"),
            (payload("/etc/passwd", "1", "png"), "source"),
            (payload("a//b.png", "1", "png"), "source"),
            (payload("", "1", "png"), "source \"\" is empty"),
            (payload("a.png", "0", "png"), "width is 0"),
            (payload("a.png", "1025", "png"), "width is 1025"),
            (payload("a.png", "-1", "png"), "-1"),
            (payload("a.png", "1.5", "png"), "1.5"),
            (payload("a.png", "1", "gif"), "gif"),
            (r#"{"source":"a.png"}"#.into(), "target"),
            ("[]".into(), "payload"),
            ("".into(), "payload"),
        ] {
            let error = Request::parse(&text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
