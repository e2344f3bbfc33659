//! Facts about processes: how they end, whether they are stopped, and about this process itself.
//!
//! Does not start processes; the `guardian` does.
//!
//! *Invariant:* everything reported has been read from the kernel.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::WaitStatus;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, getpgid, getppid, setpgid, setsid};

use cuda_cluster_wire::process::Exit;

/// How a process ended, given what `waitpid` returned.
pub(super) fn exit(status: WaitStatus) -> Option<Exit> {
    match status {
        WaitStatus::Exited(_, code) => Some(Exit::status(code)),
        WaitStatus::Signaled(_, signal, core_dumped) => {
            Some(Exit { core_dumped, ..Exit::by_signal(signal as i32) })
        }
        _ => None,
    }
}

/// Whether a process is stopped, by a signal or a debugger; `None` if it does not exist.
pub fn is_stopped(pid: u32) -> Option<bool> {
    let state: char = stat(pid, 3)?;
    Some(matches!(state, 'T' | 't'))
}

/// Takes a descriptor that this process inherited, and marks it to be closed by `exec`.
///
/// # Errors
/// If the descriptor is not open.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let command = |command: libc::c_int, argument: libc::c_int| {
        // SAFETY: `fcntl` takes any number and refuses one that is not open; the commands below
        // touch no memory.
        Errno::result(unsafe { libc::fcntl(number, command, argument) })
    };
    let own = command(libc::F_DUPFD_CLOEXEC, 3)?;
    command(libc::F_SETFD, libc::FD_CLOEXEC)?;
    // SAFETY: the kernel has just made this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// The program that is started has standard input, output and error, and no other descriptor of
/// this process: what outlives its caller must not keep the caller's locks, pipes and files.
pub fn without_descriptors(command: &mut Command) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, MOST_DESCRIPTORS));
    let most = most.min(MOST_DESCRIPTORS);
    let mark = move || {
        let close_on_exec = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
        // SAFETY: the call changes flags of descriptors only, of which this process has its own.
        let marked =
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, close_on_exec) };
        if marked != 0 {
            // Before Linux 5.11.
            for number in 3..libc::c_int::try_from(most).unwrap_or(libc::c_int::MAX) {
                // SAFETY: as above; a number that is not open is refused.
                unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
            }
        }
        Ok(())
    };
    // SAFETY: between `fork` and `exec` only these two system calls are made; nothing is allocated,
    // and no lock is taken.
    unsafe { command.pre_exec(mark) };
}

/// The program that is started after [`without_descriptors`] has this descriptor, too, under the
/// number that is returned, and takes it with [`left_to_us`].
pub fn with_descriptor(command: &mut Command, descriptor: OwnedFd) -> RawFd {
    let number = descriptor.as_raw_fd();
    let unmark = move || {
        // SAFETY: the call changes a flag of a descriptor that is open as long as this closure is.
        Errno::result(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0) })?;
        Ok(())
    };
    // SAFETY: between `fork` and `exec` only this system call is made.
    unsafe { command.pre_exec(unmark) };
    number
}

/// Takes the descriptor that [`with_descriptor`] has left to this process alone.
///
/// # Errors
/// If the descriptor is not open.
pub fn left_to_us(number: RawFd) -> io::Result<OwnedFd> {
    let own = inherited(number)?;
    // SAFETY: nothing else in this process has it.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    Ok(own)
}

/// Where the kernel cannot mark all descriptors at once, so many are.
const MOST_DESCRIPTORS: u64 = 1 << 16;

/// Whether this process ignores a signal, as its parent may have arranged (nohup(1)).
pub fn ignores(signal: Signal) -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| ignored(&status, signal as u32))
}

/// Whether a signal is in the mask of `/proc/PID/status`, proc(5).
fn ignored(status: &str, signal: u32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Resident memory of a process in bytes; `None` if it does not exist.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    resident(pid).map(|resident| resident.bytes)
}

/// Resident memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    pub bytes: u64,
    /// Of these, those of files and of memory that other processes may share.
    pub shared_bytes: u64,
}

/// As [`resident_bytes`], with what is shared.
pub fn resident(pid: u32) -> Option<Resident> {
    // The second and the third field count pages, proc(5).
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    let page = u64::try_from(page).ok()?;
    let mut figures = statm.split(' ').skip(1).map_while(|pages| pages.parse::<u64>().ok());
    Some(Resident { bytes: figures.next()? * page, shared_bytes: figures.next()? * page })
}

/// Processor time that a process has used, without its children; `None` if it does not exist.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    let (user, system): (u64, u64) = (stat(pid, 14)?, stat(pid, 15)?);
    Some(Duration::from_millis((user + system) * 1000 / ticks_a_second()?))
}

/// Time since a process was started; `None` if it does not exist.
pub fn age(pid: u32) -> Option<Duration> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?;
    let started = Duration::from_millis(started(pid)? * 1000 / ticks_a_second()?);
    Some(Duration::from(now).saturating_sub(started))
}

/// A process's parent; `None` if it has ended.
pub fn parent(pid: u32) -> Option<u32> {
    stat(pid, 4)
}

/// When a process was started, in ticks of the clock that counts since boot.
pub(super) fn started(pid: u32) -> Option<u64> {
    stat(pid, 22)
}

/// A field of `/proc/PID/stat` after its second, the process's name, numbered as in proc(5).
///
/// The name may contain any character; the last `)` ends it.
pub(super) fn stat<T: FromStr>(pid: u32, field: usize) -> Option<T> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_the_second) = stat.rsplit_once(") ")?;
    after_the_second.split(' ').nth(field.checked_sub(3)?)?.parse().ok()
}

fn ticks_a_second() -> Option<u64> {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    u64::try_from(ticks).ok().filter(|ticks| *ticks > 0)
}

/// Maximum size in bytes of core files of this process and its children; `None` if unlimited.
pub fn core_limit_bytes() -> Option<u64> {
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE);
    let (soft, _) = limit.ok()?;
    (soft != nix::sys::resource::RLIM_INFINITY).then_some(soft)
}

/// The path of this process's program, to start it again with other arguments.
///
/// `/proc/self/exe` if the file has been replaced, otherwise the path that users recognise in `ps`.
pub fn own_program() -> PathBuf {
    match std::env::current_exe() {
        Ok(path) if path.exists() => path,
        _ => PathBuf::from("/proc/self/exe"),
    }
}

/// What has become of the file of this process's program since it was started; `None` if nothing
/// has. Who needs the program again uses [`own_program`].
pub fn own_program_note() -> Option<String> {
    let link = std::fs::read_link("/proc/self/exe").ok()?;
    // What the kernel appends to the name of a file that has no name any more, proc(5).
    let path = link.as_os_str().as_bytes().strip_suffix(b" (deleted)")?;
    let path = Path::new(OsStr::from_bytes(path));
    let what = if path.exists() { "replaced" } else { "deleted" };
    let path = path.display();
    (!link.exists()).then(|| format!("{path} was {what}: this cluster goes on with the former one"))
}

/// Leaves the terminal's session, so that its hang-up and Ctrl-C no longer reach this process.
pub fn become_session_leader() {
    if setsid().is_ok() {
        return;
    }
    // The leader of a process group has to leave it first. Who leads a session already stays.
    let parents = getpgid(Some(getppid()));
    let _ = parents.and_then(|group| setpgid(Pid::from_raw(0), group)).and_then(|()| setsid());
}

/// Redirects standard input to `/dev/null`, so that its writers see their reader's end when another
/// process that has it ends.
///
/// # Errors
/// If `/dev/null` cannot be opened.
pub fn let_go_of_input() -> io::Result<()> {
    Ok(dup2_stdin(&std::fs::File::open("/dev/null")?)?)
}

/// Redirects standard input, output and error to `/dev/null`, so that readers of the old ones see
/// their end.
///
/// # Errors
/// If `/dev/null` cannot be opened.
pub fn let_go_of_output() -> std::io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

/// Asks a process to end; does nothing if it has ended.
pub fn terminate(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_wire::process::signal_name;

    #[test]
    fn an_ignored_signal_is_in_the_mask() {
        let status = "Name:\tx\nSigBlk:\t0000000000000003\nSigIgn:\t0000000000001001\n";
        assert!(ignored(status, 1) && ignored(status, 13));
        assert!(!ignored(status, 2) && !ignored("", 1));
    }

    #[test]
    fn a_process_is_stopped_or_not_or_not_there() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        assert_eq!(is_stopped(child.id()), Some(false));
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        nix::sys::signal::kill(pid, Signal::SIGSTOP).expect("it lives");
        while is_stopped(child.id()) != Some(true) {
            std::thread::yield_now();
        }
        child.kill().expect("it lives");
        child.wait().expect("a child");
        assert_eq!(is_stopped(child.id()), None);
    }

    #[test]
    fn processor_time_grows_with_work_and_is_of_a_process_that_exists() {
        let own = std::process::id();
        let before = cpu_time(own).expect("it lives");
        while cpu_time(own).expect("it lives") < before + Duration::from_millis(20) {
            std::hint::black_box((0..100_000u64).sum::<u64>());
        }
        assert_eq!(cpu_time(u32::MAX), None);
    }

    #[test]
    fn a_process_is_as_old_as_its_start_is_long_ago() {
        let own = age(std::process::id()).expect("it lives");
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let young = age(child.id()).expect("it lives");
        assert!(young <= age(std::process::id()).expect("it lives"), "{young:?}, {own:?}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(age(child.id()).expect("it lives") >= young + Duration::from_millis(40));
        child.kill().expect("it lives");
        child.wait().expect("a child");
        assert_eq!(age(child.id()), None);
    }

    #[test]
    fn a_descriptor_that_is_not_there_is_not_inherited() {
        assert!(inherited(-1).is_err());
        assert!(inherited(987_654).is_err());
    }

    #[test]
    fn an_end_by_a_signal_names_it_as_the_system_does() {
        for signal in Signal::iterator() {
            let name = signal_name(signal as i32);
            assert_eq!(name.as_deref(), Some(signal.as_str()), "signal {}", signal as i32);
        }
    }
}
