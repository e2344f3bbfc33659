//! Releases memory that a process needed only to start; tells when the kernel had too little.
//!
//! *Invariant:* only unmodified pages are released, so the only cost is reading them again.

use std::ffi::{c_int, c_void};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use nix::sys::mman::{MmapAdvise, madvise};

/// Releases freed heap and the pages of this program's code. Pages that are used again are mapped
/// from the page cache, which takes about a microsecond each.
///
/// For processes that wait for hours after start-up. Errors are ignored.
pub fn give_back_memory() {
    give_back_freed_heap();
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return };
    let Ok(program) = fs::metadata("/proc/self/exe") else { return };
    for (start, length) in maps.lines().filter_map(|line| code_of(line, program.ino())) {
        let Some(start) = NonNull::new(std::ptr::without_provenance_mut::<c_void>(start)) else {
            continue;
        };
        // SAFETY: the range is a private file mapping that is not writable, so its pages equal the
        // file's, and dropping them only makes the kernel map them again.
        let _ = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) };
    }
}

/// Releases freed memory that is still in the heap.
pub fn give_back_freed_heap() {
    // SAFETY: malloc_trim has no preconditions.
    unsafe { libc::malloc_trim(0) };
}

/// Limits how many freed bytes the heap keeps.
///
/// By default glibc keeps more and more: up to 64 MiB at the end of each heap, with as many heaps
/// as threads (mallopt(3), `M_TRIM_THRESHOLD` and `M_ARENA_MAX`). Releasing everything at once
/// would cost a page fault for each page that is used again.
pub fn keep_freed_up_to(bytes: u64) {
    let each = bytes / 2;
    let settings = [
        (libc::M_MMAP_THRESHOLD, (each / 2).clamp(256 << 10, 32 << 20)),
        (libc::M_TRIM_THRESHOLD, each.clamp(1 << 20, 1 << 30)),
        (libc::M_ARENA_MAX, 2),
    ];
    for (parameter, value) in settings {
        let value = c_int::try_from(value).unwrap_or(c_int::MAX);
        // SAFETY: mallopt has no preconditions; a parameter that it does not know changes nothing.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// How many processes the kernel has ended for want of memory since it started, in control groups
/// or on the whole machine; `None` before Linux 4.13.
pub fn ended_for_want_of_memory() -> Option<u64> {
    counted(&fs::read_to_string("/proc/vmstat").ok()?)
}

/// The counter in the text of `/proc/vmstat`, which has a name and a number in each line.
fn counted(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Address and length of a mapping of the program's code, from a line of `/proc/PID/maps`, proc(5):
/// addresses, permissions, offset, device, inode, path.
fn code_of(line: &str, program: u64) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (addresses, permissions) = (fields.next()?, fields.next()?);
    let inode: u64 = fields.nth(2)?.parse().ok()?;
    let (start, end) = addresses.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    (permissions == "r-xp" && inode == program).then_some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counter_of_ends_for_want_of_memory_is_found() {
        assert_eq!(counted("pgfault 5\noom_kill 3\noom_kill_x 9\n"), Some(3));
        assert_eq!(counted("pgfault 5\n"), None);
        assert!(ended_for_want_of_memory().is_some(), "this kernel counts");
    }

    #[test]
    fn only_the_programs_own_code_is_given_back() {
        let line = |permissions: &str, inode: u64| {
            format!("55d0a000-55d0c000 {permissions} 00002000 fe:00 {inode}    /usr/bin/program")
        };
        assert_eq!(code_of(&line("r-xp", 7), 7), Some((0x55d0_a000, 0x2000)));
        assert_eq!(code_of(&line("r--p", 7), 7), None, "relocations are written there");
        assert_eq!(code_of(&line("r-xp", 8), 7), None, "a library's");
        assert_eq!(code_of("7ffd1000-7ffd2000 r-xp 00000000 00:00 0  [vdso]", 7), None);
    }
}
