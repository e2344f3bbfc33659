//! Default values of UCX's variables, for what UCX takes from its environment only.
//!
//! Does not override what the caller's environment says.
//!
//! *Invariant:* the environment is changed only while this process has one thread.

use std::path::Path;

use super::Error;
use super::context::Setting;

/// What every process of ours wants of UCX, unless its environment says otherwise.
///
/// Endpoints with error handling lose shared memory unless the transports are told to handle
/// errors. What `CMA_MEMORY_INVALIDATE` waives, revoking a peer's access to a buffer after an
/// error, is about reading here: receivers read from senders, and a sender's buffer is parked until
/// the end.
///
/// UCX copies one piece of at most 512 KiB between two looks for messages. With four, what a
/// message costs besides its copy is paid for several at once, before the next copy empties the
/// caches; with more, other peers' messages would wait for longer than a fifth of a millisecond.
///
/// UCX stages what it cannot read directly. For device memory it takes 128 pieces of 4 MiB of the
/// device itself as it needs them, which is no part of any plan, and on a full GPU never comes; so
/// it stages in host memory alone (ucp_context.c, `RNDV_FRAG_MEM_TYPES`; until 1.16 the name was
/// singular, and only the host was meant).
pub fn defaults() -> Vec<Setting> {
    [
        ("RNDV_FRAG_MEM_TYPES", "host"),
        ("POSIX_ERROR_HANDLING", "y"),
        ("CMA_MEMORY_INVALIDATE", "y"),
        ("CMA_TX_QUOTA", "4"),
        // Variables of transports that are not here are no mistake.
        ("WARN_UNUSED_ENV_VARS", "n"),
    ]
    .map(|(name, value)| Setting::new(name, value))
    .into()
}

/// Puts settings into the environment of this process where it has no value for them yet.
///
/// Must run before the first thread starts.
///
/// # Errors
/// If this process has more than one thread, since C code may be reading the environment.
pub fn set_defaults(settings: &[Setting]) -> Result<(), Error> {
    let action = "count this process's threads";
    let threads = Path::new("/proc/self/task")
        .read_dir()
        .map_err(|source| Error::System { action, source })?
        .count();
    if threads != 1 {
        return Err(Error::Threads { threads });
    }
    for setting in settings {
        let name = format!("UCX_{}", setting.name);
        if std::env::var_os(&name).is_none() {
            // SAFETY: the only thread is this one, so nobody reads the environment meanwhile.
            unsafe { std::env::set_var(name, &setting.value) };
        }
    }
    Ok(())
}
