//! Reads the files of a run directory, whatever stands in their place.
//!
//! *Invariant:* reading waits for nobody, as opening a pipe waits for its writer.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file.
///
/// # Errors
/// As of the system; what is no file, such as a pipe, is invalid.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// The bytes of a file.
///
/// # Errors
/// As of [`open`].
pub fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file.
///
/// # Errors
/// As of [`open`], and if it is no UTF-8.
pub fn text(path: &Path) -> io::Result<String> {
    String::from_utf8(bytes(path)?).map_err(|_| io::ErrorKind::InvalidData.into())
}
