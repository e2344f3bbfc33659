//! Defaults for UCX's variables, for settings that UCX takes only from its environment.
//!
//! Does not override the caller's environment.
//!
//! *Invariant:* the environment is changed only while this process has one thread.

use std::path::Path;

use super::Error;
use super::context::Setting;

/// Settings of every process of ours, unless its environment has others.
///
/// Endpoints with error handling lose shared memory unless the transports are told to handle
/// errors. `CMA_MEMORY_INVALIDATE` gives up revoking a peer's access to a buffer after an error;
/// here this concerns reading only: receivers read from senders, and a sender's buffer is kept
/// until the end.
///
/// UCX copies one piece of at most 512 KiB between two polls for messages. With four, the cost of a
/// message besides its copy is paid for several at once, before the next copy empties the caches;
/// with more, other peers' messages would wait for longer than a fifth of a millisecond.
///
/// UCX stages what it cannot read directly. For device memory it allocates 128 pieces of 4 MiB on
/// the device as it needs them, which no plan accounts for, and on a full GPU staging never
/// succeeds; so it stages in host memory only (ucp_context.c, `RNDV_FRAG_MEM_TYPES`; until 1.16 the
/// name was singular, and only the host was meant).
///
/// UCX keeps peers' device memory mapped, also after they have freed it. It removes the mapping
/// that it has not used for longest once the mappings of a peer exceed a limit, which it has not
/// by default (`CUDA_IPC_CACHE_MAX_SIZE`, since 1.21). `mapped_bytes` is that limit.
pub fn defaults(mapped_bytes: Option<u64>) -> Vec<Setting> {
    let mapped =
        mapped_bytes.map(|bytes| Setting::new("CUDA_IPC_CACHE_MAX_SIZE", bytes.to_string()));
    [
        ("RNDV_FRAG_MEM_TYPES", "host"),
        ("POSIX_ERROR_HANDLING", "y"),
        ("CMA_MEMORY_INVALIDATE", "y"),
        ("CMA_TX_QUOTA", "4"),
        // Don't warn about variables of transports that are not present.
        ("WARN_UNUSED_ENV_VARS", "n"),
    ]
    .into_iter()
    .map(|(name, value)| Setting::new(name, value))
    .chain(mapped)
    .collect()
}

/// The limit of mappings that the environment has, which the caller may have set, if it is a number
/// of bytes.
pub fn limit_of_mappings() -> Option<u64> {
    std::env::var("UCX_CUDA_IPC_CACHE_MAX_SIZE").ok()?.parse().ok()
}

/// Sets variables in this process's environment that have no value yet.
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
