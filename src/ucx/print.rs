//! What UCX prints, as text.
//!
//! *Invariant:* every stream that is opened is closed, and its memory freed, before the text is
//! given out.

use std::ffi::CStr;
use std::io;

use super::Error;

/// Everything that `print` writes to the stream it gets.
///
/// # Errors
/// If the system has no memory for the text.
pub(super) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Result<String, Error> {
    let system = |action| Error::System { action, source: io::Error::last_os_error() };
    let (mut text, mut length) = (std::ptr::null_mut(), 0usize);
    // SAFETY: two places that stay valid until the stream is closed.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut length) };
    if stream.is_null() {
        return Err(system("open a stream in memory"));
    }
    print(stream);
    // SAFETY: the stream is open, and is not used after this.
    if unsafe { libc::fclose(stream) } != 0 || text.is_null() {
        return Err(system("close a stream in memory"));
    }
    // SAFETY: a closed memory stream leaves a C string.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the caller of `open_memstream` frees the text, once.
    unsafe { libc::free(text.cast()) };
    Ok(copy)
}
