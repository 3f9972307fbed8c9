//! Key templates: `payment:{customer_id}`, `{order.lines[0].sku}`.
//!
//! A template is text with fields of the payload in braces; `{{` and `}}` are braces. Rendering is a pure
//! function of template and payload, so a key can be computed wherever the payload is.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// The longest key that is stored, in bytes. Longer ones fail their job with this number in the message.
pub const MAX_KEY_BYTES: usize = 1024;

/// One step of a path into the payload.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// A member of an object.
    Field(String),
    /// An element of an array, from 0.
    Index(usize),
}

/// A path into the payload, at least one step long.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Path(Vec<Step>);

impl Path {
    /// The steps, outermost first.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.0
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.0.iter().enumerate() {
            match step {
                Step::Field(name) if at == 0 => f.write_str(name)?,
                Step::Field(name) => write!(f, ".{name}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// What a payload holds at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found<'a> {
    /// A string, number or boolean, as it appears in a key.
    Scalar(Cow<'a, str>),
    /// Nothing, or null.
    Missing,
    /// An object or array.
    NotScalar,
}

/// A payload, whatever format it is kept in.
pub trait Payload {
    /// What is at `path`.
    fn find(&self, path: &Path) -> Found<'_>;
    /// The names of the payload's top-level fields, for the error message.
    fn field_names(&self) -> Vec<String>;
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Part {
    Text(String),
    Field(Path),
}

/// A key as declared: text with fields of the payload in braces.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct KeyTemplate {
    source: String,
    parts: Vec<Part>,
}

impl fmt::Display for KeyTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

impl fmt::Debug for KeyTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyTemplate({:?})", self.source)
    }
}

/// Why a template was refused when it was declared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Nothing at all.
    #[error("a key must not be empty")]
    Empty,
    /// `{` without its `}`.
    #[error("`{source_text}` opens a brace at byte {at} that is never closed; write `{{{{` for a brace in the key")]
    Unclosed {
        /// The template.
        source_text: String,
        /// Where the brace stands.
        at: usize,
    },
    /// `}` without its `{`.
    #[error("`{source_text}` closes a brace at byte {at} that was never opened; write `}}}}` for a brace in the key")]
    Unopened {
        /// The template.
        source_text: String,
        /// Where the brace stands.
        at: usize,
    },
    /// The text between the braces is no path.
    #[error("`{{{path}}}` in `{source_text}` is not a path; write `{{field}}`, `{{order.id}}` or `{{lines[0].sku}}`")]
    BadPath {
        /// The template.
        source_text: String,
        /// What stood between the braces.
        path: String,
    },
}

/// Why a payload has no key. Fails that job permanently: another attempt would find the same payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The field is not there or null.
    #[error("key `{template}` needs `{path}`, which the payload lacks; it has {fields}")]
    Missing {
        /// The template.
        template: String,
        /// The field asked for.
        path: String,
        /// The payload's fields, ready to print.
        fields: String,
    },
    /// The field is an object or array.
    #[error("key `{template}` needs `{path}` to be text, a number or a boolean, and it is an object or array; the payload has {fields}")]
    NotScalar {
        /// The template.
        template: String,
        /// The field asked for.
        path: String,
        /// The payload's fields, ready to print.
        fields: String,
    },
    /// The key cannot be stored.
    #[error("key `{template}` renders to {bytes} bytes; {MAX_KEY_BYTES} are allowed")]
    TooLong {
        /// The template.
        template: String,
        /// The length it would have had.
        bytes: usize,
    },
    /// The key would be empty or contain a NUL character, which not every database can store.
    #[error("key `{template}` renders to {what}, which cannot be a key")]
    Unusable {
        /// The template.
        template: String,
        /// "an empty text" or the like.
        what: &'static str,
    },
}

impl FromStr for KeyTemplate {
    type Err = TemplateError;

    fn from_str(source: &str) -> Result<Self, Self::Err> {
        if source.is_empty() {
            return Err(TemplateError::Empty);
        }
        let mut parts = Vec::new();
        let mut text = String::new();
        let mut rest = source;
        while let Some(at) = rest.find(['{', '}']) {
            let position = source.len() - rest.len() + at;
            text.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            if rest[at + 1..].starts_with(brace) {
                text.push_str(brace);
                rest = &rest[at + 2..];
                continue;
            }
            if brace == "}" {
                return Err(TemplateError::Unopened { source_text: source.to_owned(), at: position });
            }
            let inner = &rest[at + 1..];
            let end = inner.find('}').ok_or_else(|| TemplateError::Unclosed { source_text: source.to_owned(), at: position })?;
            let path = parse_path(&inner[..end])
                .ok_or_else(|| TemplateError::BadPath { source_text: source.to_owned(), path: inner[..end].to_owned() })?;
            if !text.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut text)));
            }
            parts.push(Part::Field(path));
            rest = &inner[end + 1..];
        }
        text.push_str(rest);
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
        Ok(KeyTemplate { source: source.to_owned(), parts })
    }
}

fn parse_path(text: &str) -> Option<Path> {
    let mut steps = Vec::new();
    for (at, dotted) in text.split('.').enumerate() {
        let (name, mut indexes) = match dotted.find('[') {
            Some(open) => dotted.split_at(open),
            None => (dotted, ""),
        };
        if name.is_empty() && (at > 0 || indexes.is_empty()) || name.contains([']', '{', '}']) || name.trim() != name {
            return None;
        }
        if !name.is_empty() {
            steps.push(Step::Field(name.to_owned()));
        }
        while !indexes.is_empty() {
            let close = indexes.find(']')?;
            let digits = indexes.strip_prefix('[')?.get(..close - 1)?;
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            steps.push(Step::Index(digits.parse().ok()?));
            indexes = &indexes[close + 1..];
        }
    }
    (!steps.is_empty()).then_some(Path(steps))
}

impl KeyTemplate {
    /// The key of this payload.
    ///
    /// # Errors
    /// When a field is missing or no scalar, or the key cannot be stored.
    pub fn render(&self, payload: &dyn Payload) -> Result<String, RenderError> {
        let fields = || match payload.field_names() {
            names if names.is_empty() => "no fields".to_owned(),
            names => {
                let shown: Vec<_> = names.iter().take(20).map(|name| format!("`{name}`")).collect();
                let more = if names.len() > 20 { format!(" and {} more", names.len() - 20) } else { String::new() };
                format!("{}{more}", shown.join(", "))
            }
        };
        let mut key = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => key.push_str(text),
                Part::Field(path) => match payload.find(path) {
                    Found::Scalar(value) => key.push_str(&value),
                    Found::Missing => {
                        return Err(RenderError::Missing { template: self.source.clone(), path: path.to_string(), fields: fields() });
                    }
                    Found::NotScalar => {
                        return Err(RenderError::NotScalar { template: self.source.clone(), path: path.to_string(), fields: fields() });
                    }
                },
            }
        }
        match key {
            key if key.is_empty() => Err(RenderError::Unusable { template: self.source.clone(), what: "an empty text" }),
            key if key.contains('\0') => Err(RenderError::Unusable { template: self.source.clone(), what: "a text with a NUL character" }),
            key if key.len() > MAX_KEY_BYTES => Err(RenderError::TooLong { template: self.source.clone(), bytes: key.len() }),
            key => Ok(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A payload by hand: path text → value.
    struct Fields(Vec<(&'static str, Found<'static>)>);

    impl Payload for Fields {
        fn find(&self, path: &Path) -> Found<'_> {
            self.0.iter().find(|(at, _)| *at == path.to_string()).map_or(Found::Missing, |(_, found)| found.clone())
        }
        fn field_names(&self) -> Vec<String> {
            self.0.iter().map(|(at, _)| (*at).to_owned()).collect()
        }
    }

    fn payload() -> Fields {
        Fields(vec![
            ("customer_id", Found::Scalar("123".into())),
            ("order.lines[0].sku", Found::Scalar("a-7".into())),
            ("order", Found::NotScalar),
            ("nul", Found::Scalar("a\0b".into())),
            ("empty", Found::Scalar("".into())),
        ])
    }

    #[test]
    fn templates_render() {
        for (template, key) in [
            ("payment-processing", "payment-processing"),
            ("payment:{customer_id}", "payment:123"),
            ("{order.lines[0].sku}", "a-7"),
            ("{{{customer_id}}}", "{123}"),
            ("a{{b}}c", "a{b}c"),
            ("é:{customer_id}:ü", "é:123:ü"),
        ] {
            let parsed: KeyTemplate = template.parse().expect(template);
            assert_eq!(parsed.render(&payload()).as_deref(), Ok(key));
            assert_eq!(parsed.to_string(), template);
        }
    }

    #[test]
    fn a_payload_without_the_field_is_told_what_it_has() {
        let check = |template: &str, expected: &str| {
            let error = template.parse::<KeyTemplate>().expect(template).render(&payload()).expect_err(template);
            assert_eq!(error.to_string(), expected);
        };
        let has = "`customer_id`, `order.lines[0].sku`, `order`, `nul`, `empty`";
        check("x:{player.id}", &format!("key `x:{{player.id}}` needs `player.id`, which the payload lacks; it has {has}"));
        check(
            "{order}",
            &format!(
                "key `{{order}}` needs `order` to be text, a number or a boolean, and it is an object or array; the payload has {has}"
            ),
        );
        check("{nul}", "key `{nul}` renders to a text with a NUL character, which cannot be a key");
        check("{empty}", "key `{empty}` renders to an empty text, which cannot be a key");
        check(&"k".repeat(1025), &format!("key `{}` renders to 1025 bytes; 1024 are allowed", "k".repeat(1025)));
    }

    #[test]
    fn templates_that_cannot_be_meant_are_refused() {
        for (template, expected) in [
            ("", "a key must not be empty"),
            ("a{b", "`a{b` opens a brace at byte 1 that is never closed; write `{{` for a brace in the key"),
            ("a}b", "`a}b` closes a brace at byte 1 that was never opened; write `}}` for a brace in the key"),
            ("{}", "`{}` in `{}` is not a path; write `{field}`, `{order.id}` or `{lines[0].sku}`"),
            ("{a..b}", "`{a..b}` in `{a..b}` is not a path; write `{field}`, `{order.id}` or `{lines[0].sku}`"),
            ("{a[x]}", "`{a[x]}` in `{a[x]}` is not a path; write `{field}`, `{order.id}` or `{lines[0].sku}`"),
            ("{a[1}", "`{a[1}` in `{a[1}` is not a path; write `{field}`, `{order.id}` or `{lines[0].sku}`"),
            ("{ a }", "`{ a }` in `{ a }` is not a path; write `{field}`, `{order.id}` or `{lines[0].sku}`"),
        ] {
            assert_eq!(template.parse::<KeyTemplate>().expect_err(template).to_string(), expected);
        }
    }
}
