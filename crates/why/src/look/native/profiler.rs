//! The kernel's profiler, for one look at a thread that runs: it interrupts the thread for some
//! microseconds, and the thread does not learn of it.
//!
//! *Invariant:* nothing is read of the kernel's memory but what it has said to be written.

#![allow(unsafe_code, reason = "the profiler has no other interface")]

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{SysconfVar, sysconf};
use perf_event_open_sys as perf;

/// How much of a stack is read.
pub(super) const STACK: u32 = 32 << 10;

/// The registers that unwinding begins with, by their numbers here.
#[cfg(target_arch = "x86_64")]
pub(super) const REGISTERS: [u64; 3] = [6, 7, 8];
#[cfg(target_arch = "aarch64")]
pub(super) const REGISTERS: [u64; 4] = [29, 30, 31, 32];

/// How long a thread that runs is waited for: it may not be on a CPU.
const WITHIN: Duration = Duration::from_millis(150);

/// The time on a CPU after which the profiler looks.
const PERIOD_NS: u64 = 500_000;

/// Pages for what the profiler says; more than one stack, and a power of two.
const PAGES: usize = 32;

/// What the profiler says of a thread: whether it has anything, the registers, the length of the
/// stack, the stack, and how much of it is real. `None` if it may not look
/// (`kernel.perf_event_paranoid`), or the thread does not run.
pub(super) fn profile(tid: u32) -> Option<Vec<u8>> {
    let profiler = profiler(tid)?;
    let page = usize::try_from(sysconf(SysconfVar::PAGE_SIZE).ok()??).ok()?;
    let ring = MmapOptions::new().len(page * (PAGES + 1)).map_raw(&profiler).ok()?;
    let timeout = PollTimeout::try_from(WITHIN).ok()?;
    let ready = poll(&mut [PollFd::new(profiler.as_fd(), PollFlags::POLLIN)], timeout).ok()?;
    (ready > 0).then(|| first_record(&ring, page)).flatten()
}

#[cfg(test)]
pub(super) fn is_permitted(tid: u32) -> bool {
    profiler(tid).is_some()
}

/// A profiler of a thread's time on CPUs, outside of the kernel.
fn profiler(tid: u32) -> Option<File> {
    let mut asked = perf::bindings::perf_event_attr {
        type_: perf::bindings::PERF_TYPE_SOFTWARE,
        size: u32::try_from(size_of::<perf::bindings::perf_event_attr>()).ok()?,
        config: u64::from(perf::bindings::PERF_COUNT_SW_CPU_CLOCK),
        sample_type: u64::from(perf::bindings::PERF_SAMPLE_REGS_USER)
            | u64::from(perf::bindings::PERF_SAMPLE_STACK_USER),
        sample_regs_user: REGISTERS.iter().map(|number| 1 << number).sum(),
        sample_stack_user: STACK,
        ..Default::default()
    };
    asked.__bindgen_anon_1.sample_period = PERIOD_NS;
    asked.__bindgen_anon_2.wakeup_events = 1;
    asked.set_exclude_kernel(1);
    asked.set_exclude_hv(1);
    let flags = u64::from(perf::bindings::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: `asked` is a valid description that outlives the call, which keeps nothing of it.
    let number = unsafe { perf::perf_event_open(&raw mut asked, tid.cast_signed(), -1, -1, flags) };
    // SAFETY: the call has made this descriptor, and nobody else has it.
    (number >= 0).then(|| unsafe { File::from_raw_fd(number) })
}

/// The first record, if it is a sample: without its header.
fn first_record(ring: &MmapRaw, page: usize) -> Option<Vec<u8>> {
    let base = ring.as_ptr();
    let head = std::mem::offset_of!(perf::bindings::perf_event_mmap_page, data_head);
    // SAFETY: the kernel keeps this page mapped while `ring` is, has an aligned word there, and
    // writes it as a whole.
    let head = unsafe { AtomicU64::from_ptr(ring.as_mut_ptr().add(head).cast()) };
    let written = usize::try_from(head.load(Ordering::Acquire)).ok()?.min(page * PAGES);
    let mut record = vec![0; written];
    // SAFETY: the data begin after the first page and are at least this long; what is before the
    // head is not written again, because nobody has said that it was read.
    unsafe { std::ptr::copy_nonoverlapping(base.add(page), record.as_mut_ptr(), written) };
    let kind = u32::from_ne_bytes(*record.first_chunk()?);
    let length = u16::from_ne_bytes(*record.get(6..)?.first_chunk()?);
    let is_sample = kind == perf::bindings::PERF_RECORD_SAMPLE;
    is_sample.then(|| record.get(8..usize::from(length)).map(<[u8]>::to_vec)).flatten()
}
