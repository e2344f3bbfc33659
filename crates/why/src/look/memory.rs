//! Another process's memory.

use std::io::IoSliceMut;

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

/// The memory from an address on, up to the first page that is not there.
pub(super) fn read(pid: u32, address: u64, most: usize) -> Vec<u8> {
    const PAGE: usize = 4096;
    let Ok(base) = usize::try_from(address) else { return Vec::new() };
    let mut bytes = vec![0; most];
    let mut length = 0;
    while length < most {
        let Some(at) = base.checked_add(length) else { break };
        let wanted = (PAGE - at % PAGE).min(most - length);
        let remote = [RemoteIoVec { base: at, len: wanted }];
        let local = &mut [IoSliceMut::new(&mut bytes[length..length + wanted])];
        match process_vm_readv(Pid::from_raw(pid.cast_signed()), local, &remote) {
            Ok(read) if read > 0 => length += read,
            _ => break,
        }
    }
    bytes.truncate(length);
    bytes
}

/// What the instruction before this address calls, if it names its aim, or the one before does.
pub(super) fn called(pid: u32, back: u64) -> Option<u64> {
    let length = if cfg!(target_arch = "x86_64") { X86_CALL } else { 4 };
    let at = back.checked_sub(length)?;
    let bytes = read(pid, at, usize::try_from(length).ok()?);
    if cfg!(target_arch = "x86_64") {
        let word = |at| Some(u64::from_le_bytes(*read(pid, at, 8).first_chunk()?));
        x86(&bytes, back, word)
    } else {
        arm(&bytes, at)
    }
}

/// Whether the instruction before this address may be one that calls, whatever it calls.
#[cfg(target_arch = "x86_64")]
pub(super) fn may_call(pid: u32, back: u64) -> bool {
    let Some(at) = back.checked_sub(X86_CALL) else { return false };
    matches!(
        read(pid, at, 9)[..],
        // `call`, by a distance, or an address that a word or a register has.
        [.., 0xe8, _, _, _, _]
            | [.., 0xff, 0x10..=0x17 | 0xd0..=0xd7]
            | [.., 0xff, 0x50..=0x57, _]
            | [.., 0xff, 0x15 | 0x90..=0x97, _, _, _, _]
    )
}

/// How far above its stack pointer a function that begins here has saved the frame pointer, above
/// which is where it returns to; `None` if that is not how it begins, or if it is not past that.
#[cfg(target_arch = "x86_64")]
pub(super) fn frame(pid: u32, begin: u64, at: u64) -> Option<u64> {
    let (above, length) = x86_frame(&read(pid, begin, 64))?;
    (at >= begin.checked_add(length)?).then_some(above)
}

/// The room that the first instructions make below the saved frame pointer, and their length:
/// `push %rbp; mov %rsp, %rbp`, other registers, `sub $…, %rsp`.
#[cfg(target_arch = "x86_64")]
fn x86_frame(code: &[u8]) -> Option<(u64, u64)> {
    let rest = code.strip_prefix(&[0xf3, 0x0f, 0x1e, 0xfa]).unwrap_or(code);
    let mut rest = rest.strip_prefix(&[0x55, 0x48, 0x89, 0xe5])?;
    let mut room = 0_u64;
    loop {
        (room, rest) = match rest {
            [0x50..=0x53 | 0x56 | 0x57, after @ ..] | [0x41, 0x50..=0x57, after @ ..] => {
                (room + 8, after)
            }
            [0x48, 0x83, 0xec, size @ 0..=0x7f, after @ ..] => (room + u64::from(*size), after),
            [0x48, 0x81, 0xec, a, b, c, d, after @ ..] => {
                (room + u64::from(u32::from_le_bytes([*a, *b, *c, *d])), after)
            }
            // A page of a large frame is touched: `movq $0, (%rsp)`.
            [0x48, 0xc7, 0x04, 0x24, 0, 0, 0, 0, after @ ..] => (room, after),
            // More of it in a loop, or an end that is aligned.
            [0x4c, 0x8d, ..] | [0x49, 0x89, ..] | [0x48, 0x83 | 0x81, 0xe4, ..] => return None,
            _ => break,
        };
    }
    Some((room, (code.len() - rest.len()) as u64))
}

/// The bytes that are looked at to tell what x86 calls.
const X86_CALL: u64 = 9;

/// `call`, and how far from the next instruction its aim is, or the word that has its address,
/// which `mov` may have read before.
fn x86(bytes: &[u8], back: u64, word: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    let away = |next: u64, distance: &[u8]| {
        next.checked_add_signed(i32::from_le_bytes(*distance.first_chunk()?).into())
    };
    match bytes {
        [0x48, 0x8b, 0x05, distance @ .., 0xff, 0xd0] => {
            word(away(back.checked_sub(2)?, distance)?)
        }
        [_, _, _, 0xff, 0x15, distance @ ..] => word(away(back, distance)?),
        [_, _, _, _, 0xe8, distance @ ..] => away(back, distance),
        _ => None,
    }
}

/// `bl`, and how many instructions from this one.
fn arm(bytes: &[u8], at: u64) -> Option<u64> {
    let word = u32::from_le_bytes(*bytes.first_chunk()?);
    // 26 bits with a sign, counted in words.
    let distance = i64::from((word << 6).cast_signed() >> 4);
    (word >> 26 == 0b10_0101).then(|| at.checked_add_signed(distance)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_that_call_name_their_aim() {
        let word = |at: u64| (at == 0x1015).then_some(0x7000);
        assert_eq!(x86(&[0, 0, 0, 0, 0xe8, 0xfb, 0xff, 0xff, 0xff], 0x1005, word), Some(0x1000));
        assert_eq!(x86(&[0, 0, 0, 0xff, 0x15, 0x10, 0, 0, 0], 0x1005, word), Some(0x7000));
        // What debug builds of Rust have: `mov` to a register, and a call of that.
        assert_eq!(x86(&[0x48, 0x8b, 5, 0x12, 0, 0, 0, 0xff, 0xd0], 0x1005, word), Some(0x7000));
        assert_eq!(x86(&[0, 0, 0, 0, 0, 0, 0, 0xff, 0xd0], 0x1005, word), None);
        assert_eq!(x86(&[0xe8], 0x1005, word), None);
        assert_eq!(arm(&0x9400_0002_u32.to_le_bytes(), 0x1000), Some(0x1008));
        assert_eq!(arm(&0x97ff_ffff_u32.to_le_bytes(), 0x1000), Some(0xffc));
        assert_eq!(arm(&0xd65f_03c0_u32.to_le_bytes(), 0x1000), None, "ret");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_function_that_keeps_a_frame_pointer_tells_where_it_is() {
        let begin = [0x55, 0x48, 0x89, 0xe5];
        let frame = |rest: &[u8]| x86_frame(&[&begin, rest].concat());
        // `Condvar::wait` of std: five registers, 0x28 bytes.
        let five = [0x41, 0x57, 0x41, 0x56, 0x41, 0x55, 0x41, 0x54, 0x53];
        let wait = [&five[..], &[0x48, 0x83, 0xec, 0x28, 0x49]].concat();
        assert_eq!(frame(&wait), Some((0x50, 17)));
        assert_eq!(frame(&[0x48, 0x81, 0xec, 0, 2, 0, 0, 0xc3]), Some((0x200, 11)));
        assert_eq!(frame(&[0x48, 0x83, 0xe4, 0xf0]), None, "an aligned end");
        assert_eq!(x86_frame(&[0x48, 0x83, 0xec, 0x28]), None, "no frame pointer");
        let pid = std::process::id();
        let code = [&begin[..], &[0x48, 0x83, 0xec, 8, 0xff, 0xd0, 0xc3], &[0; 64]].concat();
        let at = code.as_ptr() as u64;
        assert_eq!((super::frame(pid, at, at + 4), super::frame(pid, at, at + 8)), (None, Some(8)));
        assert!(may_call(pid, at + 10) && !may_call(pid, at + 8));
    }

    #[test]
    fn memory_is_read_up_to_where_it_ends() {
        let bytes = [7_u8; 100];
        let address = bytes.as_ptr() as u64;
        assert_eq!(read(std::process::id(), address, 100), bytes);
        assert_eq!(read(std::process::id(), 8, 100), Vec::<u8>::new());
        assert_eq!(read(std::process::id(), u64::MAX - 4, 100), Vec::<u8>::new());
    }
}
