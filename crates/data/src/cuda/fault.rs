//! Errors after which a process can no longer use its GPU.
//!
//! *Invariant:* the first such error of a device is the one that is kept and reported.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

/// What the driver answers to every call once a context is broken (`CUresult`, cuda.h, whose texts
/// say "to continue using CUDA, the process must be terminated", or that any further work will
/// return the same error): an ECC or NVLink error that was not corrected, a contained error, an
/// illegal address, a destroyed context, a failed assertion, errors that end kernels (launch
/// timeout to launch failure), leaked tensor memory, an MPS server that ended its client, a fault
/// outside of CUDA.
const FATAL: [i32; 16] =
    [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];

/// So many refusals in a row of what always works on a GPU that is well are a fault, whatever the
/// code: 999 (unknown) is one that stays or passes.
const REFUSALS: u32 = 3;

/// An error that only the end of the process clears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The call that found it; an earlier one may have caused it.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// The driver's text for the code.
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} (CUDA error {})", self.call, self.reason, self.code)
    }
}

/// The callback for a fault. Runs on the thread that found it.
pub(super) type Listener = Box<dyn Fn(&Fault) + Send + Sync>;

/// The first fault of a device, and its listener.
pub(super) struct Faults {
    first: OnceLock<Fault>,
    refusals: AtomicU32,
    listener: OnceLock<Listener>,
    told: Once,
}

impl Default for Faults {
    fn default() -> Self {
        let refusals = AtomicU32::new(0);
        Self { first: OnceLock::new(), refusals, listener: OnceLock::new(), told: Once::new() }
    }
}

impl Faults {
    pub(super) fn first(&self) -> Option<&Fault> {
        self.first.get()
    }

    /// Calls `listener` on the first fault. If there is a listener already, it stays instead.
    pub(super) fn on_fault(&self, listener: Listener) {
        // If it is refused, the first one stays.
        let _ = self.listener.set(listener);
        self.tell();
    }

    /// Records the result of a call, if it is a fault.
    pub(super) fn note(&self, call: &'static str, code: i32, words: impl FnOnce() -> String) {
        if FATAL.contains(&code) {
            self.keep(call, code, words);
        }
    }

    /// Records the result of a question that a GPU that is well answers.
    pub(super) fn asked(
        &self,
        result: Result<(), (&'static str, i32)>,
        words: impl FnOnce(i32) -> String,
    ) {
        let Err((call, code)) = result else { return self.refusals.store(0, Ordering::Relaxed) };
        let refusals = self.refusals.fetch_add(1, Ordering::Relaxed) + 1;
        if refusals >= REFUSALS || FATAL.contains(&code) {
            self.keep(call, code, || words(code));
        }
    }

    fn keep(&self, call: &'static str, code: i32, words: impl FnOnce() -> String) {
        if self.first.get().is_none() {
            // If it is refused, another thread has found one at the same time.
            let _ = self.first.set(Fault { call, code, reason: words() });
            self.tell();
        }
    }

    /// Calls the listener, once there is a fault for it.
    fn tell(&self) {
        if let (Some(fault), Some(listener)) = (self.first.get(), self.listener.get()) {
            self.told.call_once(|| listener(fault));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn the_first_fatal_code_is_told_once_whenever_somebody_listens() {
        for early in [false, true] {
            let faults = Faults::default();
            let told = Arc::new(Mutex::new(Vec::new()));
            let listener = Arc::clone(&told);
            let listen = move || -> Listener {
                Box::new(move |fault| listener.lock().expect("whole").push(fault.to_string()))
            };
            if early {
                faults.on_fault(listen.clone()());
            }
            faults.note("cuMemAlloc", 2, || "out of memory".to_owned());
            assert!(faults.first().is_none(), "it may have memory again");
            faults.note("cuMemcpyDtoH", 700, || "illegal address".to_owned());
            faults.note("cuMemFree", 719, || "launch failure".to_owned());
            if !early {
                faults.on_fault(listen());
            }
            let told = told.lock().expect("whole");
            assert_eq!(*told, ["cuMemcpyDtoH failed: illegal address (CUDA error 700)"]);
        }
    }

    /// Errors of memory, of NVLinks, of what others did: what any call answers is the end at once.
    #[test]
    fn uncorrected_contained_and_foreign_errors_are_faults_at_once() {
        for code in [214, 220, 226, 721, 810, 911] {
            let faults = Faults::default();
            faults.note("cuMemcpyAsync", code, || "as documented".to_owned());
            assert_eq!(faults.first().map(|fault| fault.code), Some(code));
        }
    }

    #[test]
    fn whatever_is_answered_three_times_in_a_row_is_a_fault() {
        let faults = Faults::default();
        let refused = || faults.asked(Err(("cuMemGetInfo", 999)), |_| "unknown error".to_owned());
        refused();
        refused();
        faults.asked(Ok(()), |_| String::new());
        refused();
        refused();
        assert!(faults.first().is_none(), "it was well between");
        refused();
        assert_eq!(faults.first().map(|fault| fault.code), Some(999));
    }
}
