//! Where a thread is, and its stack: of one that waits from the kernel's word on its system call,
//! of one that runs from the kernel's profiler.

use std::fs;

use framehop::UnwindRegsNative;

use super::super::memory;
use super::profiler::{REGISTERS, STACK, profile};

/// A thread's registers and its stack.
#[derive(Debug)]
pub(in crate::look) struct Sample {
    frame: u64,
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code, reason = "on the stack"))]
    link: u64,
    stack_pointer: u64,
    instruction: u64,
    /// From the stack pointer on.
    stack: Vec<u8>,
}

impl Sample {
    /// Of a thread that waits in a system call. Its frame pointer is not known.
    pub(in crate::look) fn asleep(pid: u32, tid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).ok()?;
        let (stack_pointer, instruction) = place(&text)?;
        let stack = memory::read(pid, stack_pointer, STACK as usize);
        (!stack.is_empty()).then_some(Self { frame: 0, link: 0, stack_pointer, instruction, stack })
    }

    /// Of a thread that runs, as the kernel's profiler sees it; `None` if it may not be seen
    /// (`kernel.perf_event_paranoid`), or does not run after all.
    pub(in crate::look) fn running(tid: u32) -> Option<Self> {
        Self::parse(&profile(tid)?)
    }

    /// `abi`, the registers, the length of the stack, the stack, and how much of it is real.
    fn parse(record: &[u8]) -> Option<Self> {
        let words = |at: usize| Some(u64::from_ne_bytes(*record.get(at..)?.first_chunk()?));
        // Nothing of a thread that was in the kernel.
        (words(0)? != 0).then_some(())?;
        let register = |number: u64| {
            let place = REGISTERS.iter().position(|one| *one == number)?;
            words(8 * (1 + place))
        };
        let at = 8 * (1 + REGISTERS.len());
        let length = usize::try_from(words(at)?).ok()?;
        let stack = record.get(at + 8..)?.get(..length)?;
        let real = usize::try_from(words(at + 8 + length)?).ok()?.min(length);
        #[cfg(target_arch = "x86_64")]
        let (frame, link, stack_pointer, instruction) =
            (register(6)?, 0, register(7)?, register(8)?);
        #[cfg(target_arch = "aarch64")]
        let (frame, link, stack_pointer, instruction) =
            (register(29)?, register(30)?, register(31)?, register(32)?);
        let stack = stack[..real].to_vec();
        Some(Self { frame, link, stack_pointer, instruction, stack })
    }

    pub(super) fn instruction(&self) -> u64 {
        self.instruction
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn registers(&self) -> UnwindRegsNative {
        UnwindRegsNative::new(self.instruction, self.stack_pointer, self.frame)
    }

    #[cfg(target_arch = "aarch64")]
    pub(super) fn registers(&self) -> UnwindRegsNative {
        UnwindRegsNative::new(self.link, self.stack_pointer, self.frame)
    }

    /// Each place of the stack from this address on, with the two words there.
    pub(super) fn pairs_from(&self, from: u64) -> impl Iterator<Item = (u64, u64, u64)> {
        let pair = |at: u64| Some((at, self.word(at)?, self.word(at.checked_add(8)?)?));
        (from..).step_by(8).map_while(pair)
    }

    /// Eight bytes of the stack.
    pub(super) fn word(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address.checked_sub(self.stack_pointer)?).ok()?;
        Some(u64::from_ne_bytes(*self.stack.get(at..)?.first_chunk()?))
    }
}

/// Registers by what they are for.
pub(super) trait Registers {
    fn stack(&self) -> u64;
    fn frame(&self) -> u64;
    /// Those of the function that this one returns to.
    fn enter(&mut self, stack: u64, frame: u64, instruction: u64);
}

#[cfg(target_arch = "x86_64")]
impl Registers for UnwindRegsNative {
    fn stack(&self) -> u64 {
        self.sp()
    }

    fn frame(&self) -> u64 {
        self.bp()
    }

    fn enter(&mut self, stack: u64, frame: u64, instruction: u64) {
        *self = Self::new(instruction, stack, frame);
    }
}

#[cfg(target_arch = "aarch64")]
impl Registers for UnwindRegsNative {
    fn stack(&self) -> u64 {
        self.sp()
    }

    fn frame(&self) -> u64 {
        self.fp()
    }

    fn enter(&mut self, stack: u64, frame: u64, _instruction: u64) {
        *self = Self::new(0, stack, frame);
    }
}

/// The stack pointer and the instruction: the last two words of a thread that waits.
fn place(text: &str) -> Option<(u64, u64)> {
    let mut words = text.split_ascii_whitespace().rev();
    let mut word = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (instruction, stack_pointer) = (word()?, word()?);
    Some((stack_pointer, instruction))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    #[test]
    fn a_thread_that_waits_has_a_place_and_one_that_runs_has_none() {
        let text = "202 0x7f10 0x80 0x0 0x0 0x0 0x0 0x7ffd20 0x7f99\n";
        assert_eq!(place(text), Some((0x7f_fd20, 0x7f99)));
        assert_eq!(place("running\n"), None);
        assert_eq!(place("-1 0x7ffd20 0x7f99"), Some((0x7f_fd20, 0x7f99)), "in no call");
    }

    #[test]
    fn a_thread_that_runs_is_seen_where_the_kernel_permits_it() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid()).expect("it is heard");
            while !stopped.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let tid = receiver.recv().expect("it says").as_raw().cast_unsigned();
        let permitted = super::super::profiler::is_permitted(tid);
        let sample = (0..100).find_map(|_| Sample::running(tid));
        stop.store(true, Ordering::Relaxed);
        thread.join().expect("it ends");
        assert_eq!(sample.is_some(), permitted);
    }

    proptest! {
        #[test]
        fn no_record_is_too_odd(record in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Some(sample) = Sample::parse(&record) {
                prop_assert!(sample.stack.len() <= record.len());
            }
        }
    }
}
