//! The functions that a thread of native code is in, without stopping it: from its stack, from the
//! tables in its program and libraries by which stacks are unwound, and from their symbols.
//!
//! *Invariant:* what is read of the stack is never written, and what is wrong there ends the list
//! of functions early.

mod image;
mod maps;
mod profiler;
mod sample;

use std::fs::File;
use std::sync::Arc;

use framehop::{
    CacheNative, FrameAddress, MayAllocateDuringUnwind, UnwindRegsNative, Unwinder as _,
    UnwinderNative,
};

use super::memory;
use crate::evidence::Function;
pub(super) use image::Images;
use image::{Image, Section};
use maps::{Mapping, mappings};
use sample::Registers as _;
pub(super) use sample::Sample;

/// Functions that are kept, the innermost ones.
const MOST: usize = 32;

/// A process's native code.
pub(super) struct Native<'a> {
    pid: u32,
    images: &'a Images,
    mappings: Vec<Mapping>,
    /// Those of which the tables are known, by place in `mappings`.
    known: Vec<Option<Arc<Image>>>,
    unwinder: UnwinderNative<Section, MayAllocateDuringUnwind>,
    cache: CacheNative<MayAllocateDuringUnwind>,
}

impl<'a> Native<'a> {
    pub(super) fn of(pid: u32, images: &'a Images) -> Self {
        let mappings = mappings(pid);
        let known = vec![None; mappings.len()];
        let (unwinder, cache) = (UnwinderNative::new(), CacheNative::new());
        Self { pid, images, mappings, known, unwinder, cache }
    }

    /// The functions of a stack, the innermost first.
    pub(super) fn functions(&mut self, sample: &Sample) -> Vec<Function> {
        let mut registers = sample.registers();
        let mut address = FrameAddress::from_instruction_pointer(sample.instruction());
        let mut functions = Vec::new();
        while functions.len() < MOST {
            let at = address.address_for_lookup();
            let Some((function, begin)) = self.function(at) else { break };
            functions.push(function);
            let mut read = |address| sample.word(address).ok_or(());
            let next =
                self.unwinder.unwind_frame(address, &mut registers, &mut self.cache, &mut read);
            // A thread that waits has told no frame pointer.
            let next = match next {
                Ok(Some(next)) => Some(next),
                _ if registers.frame() == 0 => self
                    .told_by_its_begin(begin, at, sample, &mut registers)
                    .or_else(|| self.caller(begin, sample, &mut registers)),
                _ => None,
            };
            match next.and_then(FrameAddress::from_return_address) {
                Some(next) => address = next,
                None => break,
            }
        }
        functions
    }

    /// Where a function that begins here returns to, and the registers there, by the room that its
    /// first instructions make below the frame pointer.
    #[cfg(target_arch = "x86_64")]
    fn told_by_its_begin(
        &self,
        begin: Option<u64>,
        at: u64,
        sample: &Sample,
        registers: &mut UnwindRegsNative,
    ) -> Option<u64> {
        let saved = registers.stack().checked_add(memory::frame(self.pid, begin?, at)?)?;
        let (_, frame, back) = sample.pairs_from(saved).next()?;
        // It may have moved the stack pointer since.
        if !self.is_code(back) || !memory::may_call(self.pid, back) {
            return None;
        }
        let frame = if frame > saved && sample.word(frame).is_some() { frame } else { 0 };
        registers.enter(saved + 16, frame, back);
        Some(back)
    }

    /// Where frame pointers lie is known for x86 alone.
    #[cfg(not(target_arch = "x86_64"))]
    fn told_by_its_begin(
        &self,
        _: Option<u64>,
        _: u64,
        _: &Sample,
        _: &mut UnwindRegsNative,
    ) -> Option<u64> {
        None
    }

    /// Where a function that begins here returns to, and the registers there, found by looking
    /// for it on the stack: the address after an instruction that calls the function. If it has no
    /// name, a frame pointer is looked for, which points to another one further up.
    ///
    /// The stack has what earlier calls have left, too: so it must be possible to go on from there.
    fn caller(
        &mut self,
        begin: Option<u64>,
        sample: &Sample,
        registers: &mut UnwindRegsNative,
    ) -> Option<u64> {
        let is_frame = |at: u64, next: u64| next > at && sample.word(next).is_some();
        let pairs =
            || sample.pairs_from(registers.stack()).filter(|(.., back)| self.is_code(*back));
        let possible = |(at, next, back): &(u64, u64, u64)| match begin {
            Some(begin) => memory::called(self.pid, *back) == Some(begin),
            None => is_frame(*at, *next),
        };
        let possible: Vec<(u64, u64, u64)> = pairs().filter(possible).take(MOST).collect();
        possible.into_iter().find_map(|(at, next, back)| {
            let next = if is_frame(at, next) { next } else { 0 };
            registers.enter(at + 16, next, back);
            self.goes_on(back, sample, *registers).then_some(back)
        })
    }

    /// Whether the function to which this address belongs returns to code, too.
    fn goes_on(&mut self, back: u64, sample: &Sample, mut registers: UnwindRegsNative) -> bool {
        let Some(address) = FrameAddress::from_return_address(back) else { return false };
        if self.function(address.address_for_lookup()).is_none() {
            return false;
        }
        let mut read = |address| sample.word(address).ok_or(());
        let cache = &mut self.cache;
        let next = self.unwinder.unwind_frame(address, &mut registers, cache, &mut read);
        next.ok().flatten().is_some_and(|next| self.is_code(next))
    }

    fn is_code(&self, address: u64) -> bool {
        self.mappings.iter().any(|mapping| mapping.range.contains(&address))
    }

    /// The function at an address, whose tables are known from then on, and where it begins; `None`
    /// outside of code.
    fn function(&mut self, address: u64) -> Option<(Function, Option<u64>)> {
        let place = self.mappings.iter().position(|one| one.range.contains(&address))?;
        let mapping = &self.mappings[place];
        if self.known[place].is_none() {
            let path = format!("/proc/{}/root{}", self.pid, mapping.path);
            let image = self.images.of(mapping.file.clone(), || File::open(path).ok())?;
            if let Some(module) = image.module(mapping, address) {
                self.unwinder.add_module(module);
            }
            self.known[place] = Some(image);
        }
        let image = self.known[place].as_ref()?;
        let stated = image.stated(mapping, address)?;
        let (into, name) = image.symbol(stated).unzip();
        let name = name.unwrap_or_else(|| format!("{stated:#x}"));
        let module = mapping.path.rsplit('/').next().unwrap_or_default().to_owned();
        let begin = into.and_then(|into| address.checked_sub(into));
        Some((Function { name, module }, begin))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[inline(never)]
    fn sleeps_in_a_function_of_its_own(stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            nix::unistd::sleep(1);
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_in_the_function_that_made_it_sleep() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid()).expect("it is heard");
            sleeps_in_a_function_of_its_own(&stopped);
        });
        let tid = receiver.recv().expect("it says").as_raw().cast_unsigned();
        let (pid, images) = (std::process::id(), Images::default());
        let mut native = Native::of(pid, &images);
        let is_there = |one: &Function| one.name.contains("sleeps_in_a_function_of_its_own");
        let mut functions = Vec::new();
        for _ in 0..500 {
            functions = Sample::asleep(pid, tid).map_or(Vec::new(), |it| native.functions(&it));
            if functions.iter().any(is_there) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        thread.join().expect("it ends");
        assert!(functions.iter().any(is_there), "{functions:?}");
    }
}
