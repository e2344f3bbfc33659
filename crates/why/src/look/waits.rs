//! In which system call a thread waits, and for what: from `/proc/PID/task/TID/syscall`, and from
//! the memory that its arguments point to.
//!
//! *Invariant:* a call that is not known is shown by its number, and is said to wait for nothing.

use std::fs;

use libc::c_long;
use nix::time::{ClockId, clock_gettime};

use super::ends::Ends;
use super::memory;
use crate::evidence::{Call, Waits};

/// The most descriptors of one call that are followed.
const MOST: usize = 1024;

/// What a thread waits for, which has been asleep for so long; `None` if it runs, or waits outside
/// of a system call.
///
/// # Errors
/// If this process may not look, as for a process of another user.
pub(super) fn call(
    (pid, tid): (u32, u32),
    asleep_ms: u64,
    ends: &Ends<'_>,
) -> Result<Option<Call>, String> {
    let path = format!("/proc/{pid}/task/{tid}/syscall");
    let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let asked = |(number, arguments)| Asked { pid, tid, arguments, asleep_ms, ends }.call(number);
    Ok(parse(&text).map(asked))
}

/// The number and the arguments.
fn parse(text: &str) -> Option<(c_long, [u64; 6])> {
    let mut words = text.split_ascii_whitespace();
    let number: c_long = words.next()?.parse().ok().filter(|number| *number >= 0)?;
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some((number, arguments))
}

struct Asked<'a> {
    pid: u32,
    tid: u32,
    arguments: [u64; 6],
    asleep_ms: u64,
    ends: &'a Ends<'a>,
}

impl Asked<'_> {
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn call(&self, number: c_long) -> Call {
        let [first, second, third, fourth, ..] = self.arguments;
        let (name, waits) = match number {
            libc::SYS_futex => ("futex", self.futex(first, second, fourth)),
            libc::SYS_read => ("read", self.one(first, false)),
            libc::SYS_readv => ("readv", self.one(first, false)),
            libc::SYS_pread64 => ("pread", self.one(first, false)),
            libc::SYS_recvfrom => ("recvfrom", self.one(first, false)),
            libc::SYS_recvmsg => ("recvmsg", self.one(first, false)),
            libc::SYS_accept => ("accept", self.one(first, false)),
            libc::SYS_accept4 => ("accept4", self.one(first, false)),
            libc::SYS_write => ("write", self.one(first, true)),
            libc::SYS_writev => ("writev", self.one(first, true)),
            libc::SYS_pwrite64 => ("pwrite", self.one(first, true)),
            libc::SYS_sendto => ("sendto", self.one(first, true)),
            libc::SYS_sendmsg => ("sendmsg", self.one(first, true)),
            libc::SYS_connect => ("connect", self.one(first, true)),
            libc::SYS_fsync => ("fsync", self.one(first, true)),
            libc::SYS_fdatasync => ("fdatasync", self.one(first, true)),
            libc::SYS_splice => ("splice", self.one(first, false)),
            libc::SYS_sendfile => ("sendfile", self.one(first, true)),
            libc::SYS_getdents64 => ("getdents", self.one(first, false)),
            libc::SYS_fstat => ("fstat", self.one(first, false)),
            libc::SYS_ioctl => ("ioctl", self.one(first, false)),
            libc::SYS_ppoll => ("ppoll", self.polled(first, second, third != 0)),
            libc::SYS_pselect6 => ("pselect", self.selected(self.arguments[4] != 0)),
            libc::SYS_epoll_pwait => ("epoll_wait", self.epoll(first, int(fourth) >= 0)),
            libc::SYS_epoll_pwait2 => ("epoll_wait", self.epoll(first, fourth != 0)),
            libc::SYS_nanosleep => ("nanosleep", self.time(first, None)),
            libc::SYS_clock_nanosleep => ("clock_nanosleep", self.slept(first, second, third)),
            libc::SYS_wait4 => ("wait4", child(first)),
            libc::SYS_waitid => {
                ("waitid", if first == 1 { child(second) } else { child(u64::MAX) })
            }
            libc::SYS_flock => ("flock", self.file_lock(first)),
            libc::SYS_fcntl => ("fcntl", self.file_lock(first)),
            libc::SYS_openat => ("openat", self.path(second)),
            libc::SYS_newfstatat => ("stat", self.path(second)),
            libc::SYS_statx => ("statx", self.path(second)),
            libc::SYS_faccessat => ("access", self.path(second)),
            libc::SYS_statfs => ("statfs", self.path(first)),
            libc::SYS_execve => ("execve", self.path(first)),
            libc::SYS_unlinkat => ("unlinkat", self.path(second)),
            libc::SYS_mkdirat => ("mkdirat", self.path(second)),
            libc::SYS_io_uring_enter => ("io_uring_enter", Waits::Unknown),
            libc::SYS_semtimedop => ("semtimedop", Waits::Unknown),
            libc::SYS_semop => ("semop", Waits::Unknown),
            libc::SYS_msgrcv => ("msgrcv", Waits::Unknown),
            libc::SYS_msgsnd => ("msgsnd", Waits::Unknown),
            libc::SYS_mq_timedreceive => ("mq_receive", Waits::Unknown),
            libc::SYS_mq_timedsend => ("mq_send", Waits::Unknown),
            libc::SYS_rt_sigtimedwait => ("sigtimedwait", Waits::Unknown),
            // So shells wait for their children.
            libc::SYS_rt_sigsuspend => ("sigsuspend", child(u64::MAX)),
            libc::SYS_msync => ("msync", Waits::Unknown),
            _ => return self.elsewhere(number),
        };
        Call { name: name.to_owned(), waits, left_ms: self.left(number) }
    }

    /// How much of a time limit is left, of calls that wait for something else, too.
    fn left(&self, number: c_long) -> Option<u64> {
        let [_, second, third, fourth, fifth, _] = self.arguments;
        let given = |millis: u64| Some(millis.saturating_sub(self.asleep_ms));
        let millis = |argument: u64| u64::try_from(int(argument)).ok().and_then(given);
        match number {
            libc::SYS_futex => self.futex_limit(second, fourth),
            libc::SYS_ppoll => given(self.span(third)?),
            libc::SYS_pselect6 => given(self.span(fifth)?),
            libc::SYS_epoll_pwait => millis(fourth),
            libc::SYS_epoll_pwait2 => given(self.span(fourth)?),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => millis(third),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => millis(fourth),
            _ => None,
        }
    }

    /// Calls that newer architectures don't have.
    #[cfg(target_arch = "x86_64")]
    fn elsewhere(&self, number: c_long) -> Call {
        let [first, second, third, fourth, ..] = self.arguments;
        let timed = int(third) >= 0;
        let (name, waits) = match number {
            libc::SYS_poll => ("poll", self.polled(first, second, timed)),
            libc::SYS_select => ("select", self.selected(self.arguments[4] != 0)),
            libc::SYS_epoll_wait => ("epoll_wait", self.epoll(first, int(fourth) >= 0)),
            libc::SYS_open => ("open", self.path(first)),
            libc::SYS_stat => ("stat", self.path(first)),
            libc::SYS_lstat => ("lstat", self.path(first)),
            libc::SYS_access => ("access", self.path(first)),
            libc::SYS_pause => ("pause", Waits::Time { left_ms: None }),
            _ => return unknown(number),
        };
        Call { name: name.to_owned(), waits, left_ms: self.left(number) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn elsewhere(&self, number: c_long) -> Call {
        unknown(number)
    }

    /// futex(2): the operations that wait; the others are over at once.
    fn futex(&self, address: u64, operation: u64, timeout: u64) -> Waits {
        const WAIT: u64 = 0;
        const LOCK_PI: u64 = 6;
        const WAIT_BITSET: u64 = 9;
        const PRIVATE: u64 = 128;
        const COMMAND: u64 = 127;
        let command = operation & COMMAND;
        if !matches!(command, WAIT | LOCK_PI | WAIT_BITSET) {
            return Waits::Unknown;
        }
        Waits::Lock {
            address,
            shared: operation & PRIVATE == 0,
            timed: timeout != 0,
            holder: self.holder(address, command == LOCK_PI),
            sharers: (operation & PRIVATE == 0).then(|| self.ends.sharers(address)).flatten(),
        }
    }

    /// Who has a mutex of pthreads, whose owner glibc notes in the third word of it
    /// (`struct __pthread_mutex_s`). The word says so only for a lock that is waited for (2).
    fn holder(&self, address: u64, inherits: bool) -> Option<u32> {
        const OWNER: u32 = 0x3fff_ffff;
        let word = |offset| self.read::<4>(address + offset).map(u32::from_ne_bytes);
        let owner =
            if inherits { word(0)? & OWNER } else { word(8).filter(|_| word(0) == Some(2))? };
        let lives = || fs::exists(format!("/proc/{}/task/{owner}", self.pid)).is_ok_and(|it| it);
        (owner != self.tid && owner > 1 && (inherits || lives())).then_some(owner)
    }

    fn one(&self, descriptor: u64, writes: bool) -> Waits {
        match descriptor_of(descriptor).and_then(|number| self.ends.of(self.pid, number)) {
            Some(end) => Waits::Descriptor { end, writes },
            None => Waits::Unknown,
        }
    }

    /// poll(2): an array of `struct pollfd`.
    fn polled(&self, array: u64, count: u64, timed: bool) -> Waits {
        let count = usize::try_from(count).unwrap_or(MOST).min(MOST);
        let bytes = memory::read(self.pid, array, count * 8);
        let number = |one: &[u8]| one[..4].try_into().ok().map(i32::from_ne_bytes);
        let numbers: Vec<i32> = bytes.chunks_exact(8).filter_map(number).collect();
        self.any(numbers, timed)
    }

    /// select(2): sets of bits for reading and for writing.
    fn selected(&self, timed: bool) -> Waits {
        let [count, reads, writes, ..] = self.arguments;
        let count = usize::try_from(count).unwrap_or(MOST).min(MOST);
        let mut numbers = Vec::new();
        for set in [reads, writes] {
            let bytes =
                if set == 0 { Vec::new() } else { memory::read(self.pid, set, count.div_ceil(8)) };
            let is_in = |number: &usize| {
                bytes.get(number / 8).is_some_and(|it| it >> (number % 8) & 1 == 1)
            };
            numbers
                .extend((0..count).filter(is_in).filter_map(|number| i32::try_from(number).ok()));
        }
        self.any(numbers, timed)
    }

    fn epoll(&self, descriptor: u64, timed: bool) -> Waits {
        let numbers = descriptor_of(descriptor).map(|it| super::ends::watched(self.pid, it));
        self.any(numbers.unwrap_or_default(), timed)
    }

    fn any(&self, numbers: Vec<i32>, timed: bool) -> Waits {
        let ends =
            numbers.into_iter().filter_map(|number| self.ends.of(self.pid, number)).collect();
        Waits::Any { ends, timed }
    }

    /// futex(2): `FUTEX_WAIT` takes a length, the others a moment.
    fn futex_limit(&self, operation: u64, address: u64) -> Option<u64> {
        const WAIT: u64 = 0;
        const LOCK_PI: u64 = 6;
        const COMMAND: u64 = 127;
        const REAL_TIME: u64 = 256;
        let command = operation & COMMAND;
        if command == WAIT {
            return Some(self.span(address)?.saturating_sub(self.asleep_ms));
        }
        let real = command == LOCK_PI || operation & REAL_TIME != 0;
        let clock = if real { ClockId::CLOCK_REALTIME } else { ClockId::CLOCK_MONOTONIC };
        self.until(address, clock)
    }

    /// `struct timespec`, in milliseconds.
    fn span(&self, address: u64) -> Option<u64> {
        let bytes = self.read::<16>(address)?;
        let (seconds, nanos) = bytes.split_at(8);
        let word = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_ne_bytes);
        Some(word(seconds)?.saturating_mul(1000).saturating_add(word(nanos)? / 1_000_000))
    }

    /// How long it is until a moment of a clock.
    fn until(&self, address: u64, clock: ClockId) -> Option<u64> {
        let now = clock_gettime(clock).ok()?;
        let now = now.tv_sec() * 1000 + now.tv_nsec() / 1_000_000;
        Some(self.span(address)?.saturating_sub(u64::try_from(now).ok()?))
    }

    /// A sleep of a length, or until a moment.
    fn time(&self, address: u64, until: Option<ClockId>) -> Waits {
        let left_ms = match until {
            Some(clock) => self.until(address, clock),
            None => self.span(address).map(|asked| asked.saturating_sub(self.asleep_ms)),
        };
        Waits::Time { left_ms }
    }

    fn slept(&self, clock: u64, flags: u64, address: u64) -> Waits {
        const ABSOLUTE: u64 = 1;
        let clock = i32::try_from(clock).ok().map(ClockId::from_raw);
        self.time(address, clock.filter(|_| flags & ABSOLUTE != 0))
    }

    fn file_lock(&self, descriptor: u64) -> Waits {
        let Some(number) = descriptor_of(descriptor) else { return Waits::Unknown };
        let path = fs::read_link(format!("/proc/{}/fd/{number}", self.pid)).unwrap_or_default();
        let path = path.display().to_string();
        Waits::FileLock { holder: super::ends::lock_holder(self.pid, number), path }
    }

    fn path(&self, address: u64) -> Waits {
        let bytes = memory::read(self.pid, address, 4096);
        let path = bytes.split(|byte| *byte == 0).next().filter(|path| !path.is_empty());
        let path = path.map(|path| String::from_utf8_lossy(path).into_owned());
        let filesystem = path.as_deref().and_then(|path| super::ends::filesystem(self.pid, path));
        Waits::File { path, filesystem }
    }

    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        memory::read(self.pid, address, N).try_into().ok()
    }
}

fn unknown(number: c_long) -> Call {
    Call { name: format!("system call {number}"), waits: Waits::Unknown, left_ms: None }
}

/// A descriptor; `None` if it is none, such as `AT_FDCWD`.
fn descriptor_of(argument: u64) -> Option<i32> {
    Some(int(argument)).filter(|number| *number >= 0)
}

fn child(argument: u64) -> Waits {
    Waits::Child { pid: u32::try_from(int(argument)).ok().filter(|pid| *pid > 0) }
}

/// An argument that is an `int`, of whose register the upper half may be anything.
#[allow(clippy::cast_possible_truncation, reason = "that is what the kernel does")]
fn int(argument: u64) -> i32 {
    (argument as u32).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_runs_is_in_no_call() {
        assert_eq!(parse("running\n"), None);
        assert_eq!(parse("-1 0x7ffd 0x7f31\n"), None, "a page fault");
        let text = "230 0x0 0x1 0x7ff0 0x0 0x0 0x0 0x7ffd 0x7f31\n";
        assert_eq!(parse(text), Some((230, [0, 1, 0x7ff0, 0, 0, 0])));
    }

    #[test]
    fn a_descriptor_is_an_int() {
        assert_eq!(descriptor_of(3), Some(3));
        assert_eq!(descriptor_of(0xdead_0000_0004), Some(4), "the upper half is not looked at");
        assert_eq!(descriptor_of(0xffff_ffff), None);
        assert_eq!(child(0xffff_ffff_ffff_ffff), Waits::Child { pid: None });
    }
}
