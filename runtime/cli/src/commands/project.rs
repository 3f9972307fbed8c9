//! `new` and `wit`: a handler project that needs nothing of this repository.
//!
//! What must stay true: everything the project needs from here is embedded in this program, the WIT package
//! first of all, so that an installed binary suffices. An existing directory with anything in it is left alone.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use wasi_preview1_component_adapter_provider::WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER;

use crate::args::{Lang, NewArgs, WitArgs};
use crate::failure::{Exit, Failure, Outcome};
use crate::{json, text};

/// The only copy of the WIT package.
const WIT: &str = include_str!("../../../../wit/warp-job@1.0.0/job.wit");

const MANIFEST: &str = include_str!("../../templates/warp.toml.in");
const README: &str = include_str!("../../templates/README.md.in");
/// The longest name; it becomes a file name, a crate name and a key.
const MAX_NAME: usize = 64;

/// What one language needs besides WIT, manifest and README.
struct Template {
    language: &'static str,
    source: &'static str,
    component: &'static str,
    build: &'static str,
    ignored: &'static str,
    files: &'static [(&'static str, &'static [u8])],
}

fn template(lang: Lang) -> Template {
    match lang {
        Lang::Rust => Template {
            language: "Rust",
            source: "src/lib.rs",
            component: "target/wasm32-wasip2/release/handler.wasm",
            build: "rustup target add wasm32-wasip2\ncargo build --release --target wasm32-wasip2",
            ignored: "/target\n",
            files: &[
                ("Cargo.toml", include_bytes!("../../templates/rust/Cargo.toml.in")),
                ("src/lib.rs", include_bytes!("../../templates/rust/lib.rs.in")),
            ],
        },
        Lang::Js => Template {
            language: "JavaScript (QuickJS)",
            source: "handler.js",
            component: "component.wasm",
            build: "npm install\nnpx componentize-qjs --wit wit --js handler.js --world handler --sync -o component.wasm",
            ignored: "/node_modules\n/component.wasm\n",
            files: &[
                ("package.json", include_bytes!("../../templates/js/package.json.in")),
                ("handler.js", include_bytes!("../../templates/js/handler.js.in")),
            ],
        },
        Lang::Python => Template {
            language: "Python",
            source: "app.py",
            component: "component.wasm",
            build: "python3 -m venv .venv && . .venv/bin/activate\npip install -r requirements.txt\n\
                    componentize-py --wit-path wit --world handler componentize app -p . -o component.wasm",
            ignored: "/.venv\n/component.wasm\n__pycache__\n",
            files: &[
                ("requirements.txt", include_bytes!("../../templates/python/requirements.txt")),
                ("app.py", include_bytes!("../../templates/python/app.py.in")),
            ],
        },
        Lang::C => Template {
            language: "C",
            source: "main.c",
            component: "component.wasm",
            build: "python3 -m venv .venv && . .venv/bin/activate\npip install -r requirements.txt\nsh build.sh",
            ignored: "/.venv\n/component.wasm\n/core.wasm\n",
            files: &[
                ("requirements.txt", include_bytes!("../../templates/c/requirements.txt")),
                ("build.sh", include_bytes!("../../templates/c/build.sh.in")),
                ("main.c", include_bytes!("../../templates/c/main.c.in")),
                // Generated from the WIT package for the first-party C plugin, and the same for every handler.
                ("gen/handler.c", include_bytes!("../../../../plugins/checksum/gen/handler.c")),
                ("gen/handler.h", include_bytes!("../../../../plugins/checksum/gen/handler.h")),
                ("gen/handler_component_type.o", include_bytes!("../../../../plugins/checksum/gen/handler_component_type.o")),
                ("gen/wasi_snapshot_preview1.reactor.wasm", WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER),
            ],
        },
    }
}

/// `new`.
///
/// # Errors
/// A bad name (2), a directory that is not empty (4), or what the file system says.
pub fn new(args: &NewArgs, as_json: bool) -> Outcome {
    let name = args.name.as_str();
    check_name(name).map_err(Failure::usage)?;
    let dir = args.dir.clone().unwrap_or_else(|| PathBuf::from(name));
    let taken = |why: &str| Failure::new(Exit::Refused, format!("{} {why}; name another with --dir", dir.display()));
    match fs::read_dir(&dir) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(taken("exists and is not empty"));
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) if error.kind() == ErrorKind::NotADirectory => return Err(taken("is a file")),
        Err(error) => return Err(Failure::from(error).context(format!("failed to look at {}", dir.display()))),
    }
    let Template { language, source, component, build, ignored, files } = template(args.lang);
    let fill = |text: &str| {
        [("@language@", language), ("@source@", source), ("@component@", component), ("@build@", build), ("@name@", name)]
            .into_iter()
            .fold(text.to_owned(), |text, (mark, value)| text.replace(mark, value))
    };
    let mut written = vec!["README.md", "warp.toml", ".gitignore", "wit/job.wit"];
    write(&dir, "README.md", fill(README).as_bytes())?;
    write(&dir, "warp.toml", fill(MANIFEST).as_bytes())?;
    write(&dir, ".gitignore", format!("{ignored}/plugins\n/.warp-cache\n/warp.db*\n").as_bytes())?;
    write(&dir, "wit/job.wit", WIT.as_bytes())?;
    for (path, bytes) in files {
        // Marks stand in texts alone; what is not UTF-8 is copied as it is.
        match std::str::from_utf8(bytes) {
            Ok(text) => write(&dir, path, fill(text).as_bytes())?,
            Err(_) => write(&dir, path, bytes)?,
        }
        written.push(path);
    }
    if as_json {
        return text::print_json(&json::Created {
            dir: dir.display().to_string(),
            files: written.into_iter().map(str::to_owned).collect(),
        });
    }
    text::print(format!("wrote {} with {}", dir.display(), written.join(", ")))?;
    text::print(format!("\nnext:\n  cd {}\n  {}", dir.display(), build.replace('\n', "\n  ")))?;
    text::print(format!("  warp-host pack {component} warp.toml -o plugins/{name}.wasm"))?;
    text::print(format!("  warp-host try plugins/{name}.wasm --payload '{{\"name\": \"world\"}}'"))
}

/// A name that may be a file, a crate, a package of npm and a table of TOML.
fn check_name(name: &str) -> Result<(), String> {
    let letters = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if name.is_empty() || name.len() > MAX_NAME || !letters || !name.starts_with(|c: char| c.is_ascii_lowercase()) || name.ends_with('-') {
        return Err(format!(
            "{name:?} is not a name; write lower case letters, digits and dashes, a letter first, {MAX_NAME} at most, such as send-mail"
        ));
    }
    Ok(())
}

fn write(dir: &Path, path: &str, bytes: &[u8]) -> Outcome {
    let path = dir.join(path);
    let written = || -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, bytes)
    };
    written().map_err(|error| Failure::from(error).context(format!("failed to write {}", path.display())))
}

/// `wit`.
///
/// # Errors
/// A different file of that name (4), or what the file system says.
pub fn wit(args: &WitArgs) -> Outcome {
    let Some(dir) = &args.out else {
        return text::print(WIT.trim_end());
    };
    let path = dir.join("job.wit");
    match fs::read(&path) {
        Ok(bytes) if bytes != WIT.as_bytes() => {
            return Err(Failure::new(Exit::Refused, format!("{} is there and differs; remove it first", path.display())));
        }
        _ => write(dir, "job.wit", WIT.as_bytes())?,
    }
    text::print(format!("wrote {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_none_are_refused() {
        for good in ["a", "send-mail", "x9", "match"] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", "a-", "9a", "A", "a_b", "a b", "../a", "ä", &"a".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_handler_is_under_twenty_lines() {
        for (lang, file) in [(Lang::Rust, "src/lib.rs"), (Lang::Js, "handler.js"), (Lang::Python, "app.py"), (Lang::C, "main.c")] {
            let (_, text) = template(lang).files.iter().find(|(path, _)| *path == file).expect("the source");
            let lines = std::str::from_utf8(text).expect("text").lines().filter(|line| !line.trim().is_empty()).count();
            assert!(lines < 20, "{file} has {lines} lines");
        }
    }
}
