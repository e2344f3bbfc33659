//! What a process did and what it left, written when it exits: `report=FOLDER`, `PID.json`.
//!
//! `left` counts what the program did not give back; `refused` the calls that failed, by function and
//! code; `moved` the bytes that were copied, by where from and where to (`peer`: memory of another
//! process); `landed_later` how many of them were not there yet when the call returned. A process that
//! is killed writes nothing.
//!
//! *Invariant:* written after the destructors of everybody who links the driver.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use crate::driver::{DRIVER, Driver, ENDED};
use crate::memory::{Block, Origin};

#[derive(Default)]
pub struct Counts {
    refused: Mutex<BTreeMap<(&'static str, c_int), u64>>,
    moved: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    landed_later: AtomicU64,
}

/// What copies between two GPUs are counted as, beside copies within one.
const STAGED: (&str, &str) = ("device", "other device by way of the host");
const DIRECT: (&str, &str) = ("device", "other device");

impl Counts {
    pub fn refused(&self, function: &'static str, code: c_int) {
        let mut counts = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((function, code)).or_default() += 1;
    }

    pub fn moved(&self, from: Option<&Block>, to: Option<&Block>, bytes: usize) {
        self.count((kind(from), kind(to)), bytes);
    }

    pub fn moved_between_gpus(&self, direct: bool, bytes: usize) {
        self.count(if direct { DIRECT } else { STAGED }, bytes);
    }

    pub fn landed_later(&self, bytes: usize) {
        self.landed_later.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count(&self, way: (&'static str, &'static str), bytes: usize) {
        let mut counts = self.moved.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(way).or_default() += bytes as u64;
    }
}

fn kind(block: Option<&Block>) -> &'static str {
    match block.map(|block| &block.origin) {
        None => "host",
        Some(Origin::Own) => "device",
        Some(Origin::Mapped { .. }) => "peer",
    }
}

fn write(driver: &Driver) {
    let Some(folder) = &driver.faults.report else { return };
    let state = driver.lock();
    let blocks = |own: bool| {
        let wanted = move |block: &&Block| matches!(block.origin, Origin::Own) == own;
        let sizes = state.memory.blocks().filter(wanted).map(|block| block.bytes);
        let sizes: Vec<usize> = sizes.collect();
        json!({"count": sizes.len(), "bytes": sizes.iter().sum::<usize>()})
    };
    let (streams, events) = state.streams.left();
    let contexts = state.contexts.iter().filter(|context| context.retained > 0).count();
    let counts = &driver.counts;
    let refused = counts.refused.lock().unwrap_or_else(PoisonError::into_inner);
    let moved = counts.moved.lock().unwrap_or_else(PoisonError::into_inner);
    let refused: BTreeMap<String, u64> =
        refused.iter().map(|((call, code), n)| (format!("{call} {code}"), *n)).collect();
    let moved: BTreeMap<String, u64> =
        moved.iter().map(|((from, to), bytes)| (format!("{from} to {to}"), *bytes)).collect();
    let report = json!({
        "pid": std::process::id(),
        "process": std::env::var("CUDA_CLUSTER_PROCESS").ok(),
        "program": std::env::args_os().map(|word| word.to_string_lossy().into_owned())
            .collect::<Vec<_>>(),
        "left": {
            "allocations": blocks(true),
            "mappings": blocks(false),
            "contexts": contexts,
            "streams": streams,
            "events": events,
            "registered": state.pinned.len(),
        },
        "ever": {"allocations": state.memory.allocated, "mappings": state.memory.opened},
        "refused": refused,
        "moved": moved,
        "landed_later": counts.landed_later.load(Ordering::Relaxed),
    });
    // Nobody could be told of a failure any more; who misses the report sees it.
    let _ = std::fs::create_dir_all(folder);
    let path = folder.join(format!("{}.json", std::process::id()));
    let _ = std::fs::write(path, format!("{report:#}\n"));
}

extern "C" fn at_exit() {
    let Some(Ok(driver)) = DRIVER.get() else { return };
    if driver.pid == std::process::id() {
        write(driver);
        ENDED.store(true, Ordering::Relaxed);
    }
}

/// The loader calls it after the destructors of all libraries that need this one.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
