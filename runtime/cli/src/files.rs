//! Writing files whole.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

/// Writes a file aside and renames it, keeping the rights of the one it replaces.
///
/// # Errors
/// What the file system says.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link keeps pointing at what it points at.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let aside = path.with_file_name(name);
    let written = || -> io::Result<()> {
        let mut file = File::create(&aside)?;
        file.write_all(bytes)?;
        if let Ok(old) = fs::metadata(path) {
            file.set_permissions(old.permissions())?;
        }
        file.sync_all()?;
        fs::rename(&aside, path)
    };
    written().inspect_err(|_| {
        let _ = fs::remove_file(&aside);
    })
}
