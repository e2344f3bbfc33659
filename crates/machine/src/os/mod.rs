//! The operating system: processes, their binding and containment, the run directory.
//!
//! Does not decide when processes start or end; `supervise` does.
//!
//! *Invariant:* a process started by this module is bound before its first instruction, and has a
//! parent-death signal.
#![allow(unsafe_code)]

use std::process::ExitCode;

pub mod argument;
pub mod binding;
pub mod containment;
mod descendants;
pub mod event_loop;
pub mod exhausted;
pub mod guardian;
pub mod limits;
pub mod log_excerpt;
pub mod log_file;
pub mod log_pages;
mod log_repeats;
pub mod memory;
pub mod notify;
pub mod own_user;
pub mod owners;
pub mod passing;
pub mod pidfd;
pub mod pmix;
pub mod presence;
pub mod process;
pub mod reading;
pub mod run_directory;
pub mod shared_memory;
pub mod shim;
pub mod tasks;

/// Runs a hidden subcommand (`__guard`, `__shim`, `__pmix`), if this process is for it. Every
/// program that starts clusters calls this at the start of `main`, while single-threaded.
pub fn dispatch() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1).map(|text| text.to_string_lossy().into_owned());
    let work: fn(&[String]) -> ExitCode = match arguments.next()?.as_str() {
        shim::SUBCOMMAND => shim::main,
        guardian::SUBCOMMAND => guardian::main,
        pmix::SUBCOMMAND => pmix::main,
        _ => return None,
    };
    Some(work(&arguments.collect::<Vec<_>>()))
}

/// Ignores SIGXFSZ, so that a file that may not grow is an error, as a full disk is. Processes that
/// this one starts do so too, up to the shim.
pub fn ignore_file_size_signal() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: no handler is installed.
    let result = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    debug_assert!(result.is_ok(), "SIGXFSZ can be ignored");
}

/// Has the ends of children wait for this process, whoever started it: children inherit that they
/// are ignored, and then nobody learns how they ended.
pub fn wait_for_children() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: no handler is installed, only the default action.
    let result = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    debug_assert!(result.is_ok(), "SIGCHLD has a default action");
}

/// Restores the default actions of the signals that Rust's runtime and this program ignore.
pub fn default_ignored_signals() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for number in [Signal::SIGPIPE, Signal::SIGXFSZ] {
        // SAFETY: no handler is installed, only the default action.
        let result = unsafe { signal(number, SigHandler::SigDfl) };
        debug_assert!(result.is_ok(), "these signals have default actions");
    }
}

/// Restores the default actions of the termination signals, for a process that no longer handles
/// them.
pub fn default_stop_signals() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: no handler is installed, only the default action.
        let result = unsafe { signal(number, SigHandler::SigDfl) };
        debug_assert!(result.is_ok(), "these signals have default actions");
    }
}
