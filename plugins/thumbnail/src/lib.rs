//! The component: turns an attempt into calls of [`scale`], and errors into failures.
//!
//! It reads below `/in` and writes below `/out`, the two folders that the manifest asks for. A target appears whole
//! or not at all: it is written under another name and then renamed, since an attempt may be stopped at any
//! instruction. It deliberately keeps nothing between attempts; every attempt gets a fresh instance.

mod request;
mod scale;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use request::Request;
use warp::job::{cancellation, log, progress};

wit_bindgen::generate!({ path: "../../wit/warp-job@1.0.0", world: "handler" });

const IN: &str = "/in";
const OUT: &str = "/out";
/// A photo is a few megabytes. What is larger would not fit into the memory cap together with its pixels.
const MAX_FILE_BYTES: u64 = 64 << 20;

struct Thumbnail;
export!(Thumbnail);

impl Guest for Thumbnail {
    fn handle(attempt: Attempt) -> Result<Option<String>, Failure> {
        let request = Request::parse(&attempt.payload).map_err(Failure::Permanent)?;
        let source = Path::new(IN).join(&request.source);

        let bytes = read(&source)?;
        step("read", 25.0)?;
        let image = scale::decode(&bytes).map_err(|e| Failure::Permanent(format!("failed to decode {}: {e}", request.source)))?;
        drop(bytes);
        step("decode", 50.0)?;
        let image = scale::fit(image, request.width, request.height);
        step("scale", 75.0)?;
        let encoded =
            scale::encode(&image, request.format).map_err(|e| Failure::Permanent(format!("failed to encode {}: {e}", request.target)))?;
        let (width, height) = (image.width(), image.height());
        step("encode", 90.0)?;
        write(&request.target, &attempt.job_id, &encoded)?;
        progress::report("thumbnail", 100.0);

        log::write(
            log::Level::Info,
            "thumbnail written",
            &[("target".into(), request.target.clone()), ("size".into(), format!("{width}x{height}"))],
        );
        Ok(Some(
            serde_json::json!({
                "target": request.target,
                "width": width,
                "height": height,
                "bytes": encoded.len(),
            })
            .to_string(),
        ))
    }
}

/// Between two steps is where this handler can stop cleanly; inside one it is stopped by force.
fn step(name: &str, percent: f32) -> Result<(), Failure> {
    progress::report("thumbnail", percent);
    if cancellation::cancelled() {
        return Err(Failure::Retryable(format!("stopped on request after step {name}")));
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let size = fs::metadata(path).map_err(|e| io_failure("read", path, &e))?.len();
    if size > MAX_FILE_BYTES {
        return Err(Failure::Permanent(format!("{} has {size} bytes, more than {MAX_FILE_BYTES}", path.display())));
    }
    fs::read(path).map_err(|e| io_failure("read", path, &e))
}

fn write(target: &str, job_id: &str, bytes: &[u8]) -> Result<(), Failure> {
    let path = Path::new(OUT).join(target);
    let partial = partial_name(&path, job_id);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| io_failure("create", folder, &e))?;
    }
    let written = fs::write(&partial, bytes).and_then(|()| fs::rename(&partial, &path));
    written.map_err(|e| {
        // The write error is what matters; a leftover is overwritten by the next attempt of the same job.
        let _ = fs::remove_file(&partial);
        io_failure("write", &path, &e)
    })
}

/// Two jobs may aim at one target, so the job's id keeps their unfinished files apart.
fn partial_name(path: &Path, job_id: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{job_id}.part"))
}

/// What cannot heal by itself ends the job: a file that is not there, is no file, or lies outside the grant.
fn io_failure(verb: &str, path: &Path, error: &io::Error) -> Failure {
    let text = format!("failed to {verb} {}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename => Failure::Permanent(text),
        _ => Failure::Retryable(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_permanent(failure: &Failure) -> bool {
        matches!(failure, Failure::Permanent(_))
    }

    #[test]
    fn a_missing_file_is_permanent_and_a_full_disk_is_not() {
        let path = Path::new("/in/a.png");
        assert!(is_permanent(&io_failure("read", path, &io::ErrorKind::NotFound.into())));
        assert!(!is_permanent(&io_failure("write", path, &io::ErrorKind::StorageFull.into())));
        assert!(!is_permanent(&io_failure("read", path, &io::Error::other("device error"))));
    }

    #[test]
    fn unfinished_files_of_two_jobs_differ_and_are_hidden() {
        let a = partial_name(Path::new("/out/x/a.png"), "1");
        assert_eq!(a, Path::new("/out/x/.a.png.1.part"));
        assert_ne!(a, partial_name(Path::new("/out/x/a.png"), "2"));
    }
}
