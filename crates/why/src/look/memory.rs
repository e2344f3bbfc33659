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

/// What the instruction before this address calls, if it names its aim.
pub(super) fn called(pid: u32, back: u64) -> Option<u64> {
    let length = if cfg!(target_arch = "x86_64") { 6 } else { 4 };
    let at = back.checked_sub(length)?;
    let bytes = read(pid, at, usize::try_from(length).ok()?);
    if cfg!(target_arch = "x86_64") {
        let word = |at| Some(u64::from_le_bytes(*read(pid, at, 8).first_chunk()?));
        x86(&bytes, back, word)
    } else {
        arm(&bytes, at)
    }
}

/// `call`, and how far from the next instruction its aim is, or the word that has its address.
fn x86(bytes: &[u8], back: u64, word: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    let away = |distance: &[u8]| {
        back.checked_add_signed(i32::from_le_bytes(*distance.first_chunk()?).into())
    };
    match bytes {
        [0xff, 0x15, distance @ ..] => word(away(distance)?),
        [_, 0xe8, distance @ ..] => away(distance),
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
        assert_eq!(x86(&[0, 0xe8, 0xfb, 0xff, 0xff, 0xff], 0x1005, word), Some(0x1000));
        assert_eq!(x86(&[0xff, 0x15, 0x10, 0, 0, 0], 0x1005, word), Some(0x7000));
        assert_eq!(x86(&[0, 0, 0, 0, 0xff, 0xd0], 0x1005, word), None);
        assert_eq!(x86(&[0xe8], 0x1005, word), None);
        assert_eq!(arm(&0x9400_0002_u32.to_le_bytes(), 0x1000), Some(0x1008));
        assert_eq!(arm(&0x97ff_ffff_u32.to_le_bytes(), 0x1000), Some(0xffc));
        assert_eq!(arm(&0xd65f_03c0_u32.to_le_bytes(), 0x1000), None, "ret");
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
