//! Small helpers for messages: nearest words, lists of words, TOML quoting.

/// The known word that was probably meant, if one is near enough.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let allowed = (word.chars().count() / 3).clamp(1, 3);
    known.iter().map(|candidate| (distance(word, candidate), *candidate)).filter(|(far, _)| *far <= allowed).min().map(|(_, near)| near)
}

/// Levenshtein's distance in characters. Words longer than any key of the format are far from all of them, which
/// also bounds the cost on hostile input.
fn distance(left: &str, right: &str) -> usize {
    const LONGEST: usize = 64;
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().take(LONGEST).collect(), right.chars().take(LONGEST).collect());
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

/// `` `a`, `b` and `c` ``.
pub(crate) fn listed<T: AsRef<str>>(words: &[T], last: &str) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{}`", word.as_ref())).collect();
    match quoted.as_slice() {
        [] => "nothing".to_owned(),
        [one] => one.clone(),
        [most @ .., end] => format!("{} {last} {end}", most.join(", ")),
    }
}

/// A text from outside, cut so that a message stays readable, with control characters escaped so that it cannot
/// steer a terminal.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 80;
    let mut out = String::new();
    for (at, c) in text.chars().enumerate() {
        if at == LONGEST {
            out.push('…');
            break;
        }
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// A TOML key: bare where that is allowed, quoted elsewhere.
pub(crate) fn toml_key(key: &str) -> String {
    let bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if bare { key.to_owned() } else { toml_string(key) }
}

/// A TOML basic string.
pub(crate) fn toml_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found_and_a_far_one_is_not() {
        let known = ["mutex", "semaphore", "retry", "timeout"];
        assert_eq!(nearest("mutx", &known), Some("mutex"));
        assert_eq!(nearest("semafore", &known), Some("semaphore"));
        assert_eq!(nearest("timeuot", &known), Some("timeout"));
        assert_eq!(nearest("priority", &known), None);
        assert_eq!(nearest(&"x".repeat(100_000), &known), None);
    }

    #[test]
    fn what_is_shown_cannot_steer_a_terminal() {
        assert_eq!(shown("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(shown(&"é".repeat(81)), format!("{}…", "é".repeat(80)));
    }
}
