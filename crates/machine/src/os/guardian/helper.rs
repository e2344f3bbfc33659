//! Starts one of our programs with a hidden subcommand.
//!
//! *Invariant:* the new process inherits standard input, output and error and the given
//! descriptors; all others are closed by `exec`.

use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::SigSet;
use nix::sys::stat::Mode;
use nix::unistd::Pid;

/// Starts this program with a hidden subcommand, as leader of its own process group, with default
/// signal actions, an empty signal mask, and `descriptors` (number here, number in the new
/// process); `/dev/null` stands for a standard stream that is not among them.
pub(super) fn spawn_at(
    helper: &Path,
    arguments: &[String],
    descriptors: &[(RawFd, RawFd)],
) -> io::Result<Pid> {
    let mut actions = PosixSpawnFileActions::init()?;
    actions.add_open(0, c"/dev/null", OFlag::O_RDONLY, Mode::empty())?;
    // Move them beyond all sources and targets first, so that none overwrites another.
    let used = descriptors.iter().flat_map(|(source, target)| [*source, *target]);
    let beyond = used.max().unwrap_or(2) + 1;
    for (source, target) in descriptors {
        actions.add_dup2(*source, target + beyond)?;
    }
    for (_, target) in descriptors {
        actions.add_dup2(target + beyond, *target)?;
        actions.add_close(target + beyond)?;
    }
    for standard in [1, 2] {
        if !descriptors.iter().any(|(_, target)| *target == standard) {
            actions.add_open(standard, c"/dev/null", OFlag::O_WRONLY, Mode::empty())?;
        }
    }
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK,
    )?;
    attributes.set_pgroup(Pid::from_raw(0))?;
    attributes.set_sigdefault(&SigSet::all())?;
    attributes.set_sigmask(&SigSet::empty())?;
    let text = |text: &str| CString::new(text).map_err(io::Error::from);
    let mut argv = vec![c"cuda-cluster".to_owned()];
    for argument in arguments {
        argv.push(text(argument)?);
    }
    let mut environment = Vec::new();
    for (name, value) in std::env::vars_os() {
        let mut entry = name.into_encoded_bytes();
        entry.push(b'=');
        entry.extend(value.into_encoded_bytes());
        environment.push(CString::new(entry)?);
    }
    Ok(posix_spawn(helper, &actions, &attributes, &argv, &environment)?)
}

/// As [`spawn_at`], with the program that this process runs.
pub(super) fn spawn(arguments: &[String], descriptors: &[(RawFd, RawFd)]) -> io::Result<Pid> {
    spawn_at(Path::new("/proc/self/exe"), arguments, descriptors)
}
