//! `/proc/PID/status`, which says what a process may do.
//!
//! *Invariant:* a line that is not there is `None`.

/// A line's value.
pub(crate) fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether a process has `CAP_IPC_LOCK` among its effective capabilities, so that the kernel does
/// not apply the limit on locked memory (`ib_umem_get`).
pub(crate) fn may_lock(status: &str) -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let mask = field(status, "CapEff").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    mask.is_some_and(|mask| mask & CAP_IPC_LOCK != 0)
}
