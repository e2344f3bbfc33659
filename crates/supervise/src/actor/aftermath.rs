//! Handles a death apart from the restart: the GPU, memory use, the crash bundle.
//!
//! *Invariant:* nothing here blocks the actor; results arrive as events.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::Actor;
use crate::core::{Event, SlotNumber};
use crate::memory::{self, MemoryFinding};
use crate::{ProcessGpu, ProcessSpec, ProcessState, crash, gpu};
use cuda_cluster_machine::os::process;
use cuda_cluster_model::text::masked;

/// Names the file into which a program of PyTorch's writes why it fails.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

impl Actor {
    /// Records which processes use memory of a slot's GPU before its process starts.
    pub(super) fn note_gpu_others(&self, slot: SlotNumber) {
        let Some((watch, gpu)) = self.gpus.clone().zip(self.gpu_of(slot)) else {
            return;
        };
        let others = Arc::clone(&self.gpu_others);
        tokio::task::spawn_blocking(move || {
            let pids: BTreeSet<u32> =
                watch.holders(&gpu).unwrap_or_default().iter().map(|holder| holder.pid).collect();
            others.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, pids);
        });
    }

    fn gpu_of(&self, slot: SlotNumber) -> Option<ProcessGpu> {
        self.launch.processes().nth(slot)?.gpu.clone()
    }

    /// Waits until a dead process's GPU is free.
    pub(super) fn await_gpu(&self, slot: SlotNumber) {
        let Some(gpu) = self.gpu_of(slot) else { return };
        let state = self.core.state();
        let living = state.processes().filter_map(|p| p.pid);
        let before = self.gpu_others.lock().unwrap_or_else(PoisonError::into_inner);
        let others = before.get(&slot).into_iter().flatten().copied().chain(living).collect();
        let within = self.launch.supervision.gpu_free_within.0;
        let (watch, events) = (self.gpus.clone(), self.inner.0.clone());
        tokio::spawn(async move {
            let finding = gpu::await_free(watch, gpu, others, within).await;
            // The receiver is gone when the cluster has ended.
            let _ = events.send(Event::Gpu { slot, finding }).await;
        });
    }

    /// Checks the memory of every process that has a limit, and sets the time of the next check.
    pub(super) fn look_at_memory(&mut self) -> Option<Event> {
        let state = self.core.state();
        let shown = state.processes();
        let mut next: Option<Duration> = None;
        let mut event = None;
        for (slot, (spec, shown)) in self.launch.processes().zip(shown).enumerate() {
            let Some((key, limit)) = self.core.key_of(slot).zip(spec.memory_limit_bytes) else {
                continue;
            };
            let percent = self.core.kill_percent(slot);
            // A process whose start has not been reported yet has used nothing.
            let resident = shown.pid.and_then(process::resident_bytes).unwrap_or(0);
            let after = match memory::judge(resident, limit, percent) {
                MemoryFinding::LookAfter(after) => after,
                MemoryFinding::Reached => {
                    let reached =
                        Event::MemoryReached { key, resident_bytes: resident, limit_bytes: limit };
                    event = event.or(Some(reached));
                    Duration::from_millis(100)
                }
            };
            next = Some(next.map_or(after, |next| next.min(after)));
        }
        self.look_at = next.map(|after| Instant::now() + after);
        event
    }

    /// Writes the crash bundle for a slot's last exit.
    pub(super) fn bundle(&mut self, slot: SlotNumber) {
        let state = self.core.state();
        let Some(shown) = state.processes().nth(slot).cloned() else {
            return;
        };
        let Some(at) = shown.last_exit.as_ref().map(|exit| exit.at.clone()) else { return };
        let Some(spec) = self.launch.processes().nth(slot).cloned() else { return };
        let (crashes, log) = (self.paths.crashes(), self.paths.log(&spec.name));
        let (gpus, events) = (self.gpus.clone(), self.inner.0.clone());
        let write = move || {
            let errors = gpus
                .zip(spec.gpu.as_ref())
                .map(|(watch, gpu)| watch.errors_since(gpu, since(&shown)));
            let errors = errors.unwrap_or_default();
            let error = spec.program.env.get(ERROR_FILE);
            let crash = crash::Crash {
                error: error.and_then(|path| crash::take_error(Path::new(path))),
                process: &shown,
                pid: shown.last_exit.as_ref().and_then(|exit| exit.pid),
                argv: &spec.program.argv,
                environment: masked(environment(&spec)),
                core_limit_bytes: process::core_limit_bytes(),
                gpu_errors: &errors,
            };
            crash::write(&crashes, &crash, &log).map(|path| (path, errors))
        };
        // Drop handles of bundles that are already written.
        while self.bundles.try_join_next().is_some() {}
        self.bundles.spawn(async move {
            // A full disk must not stop the cluster; the cause is also in the state.
            if let Ok(Ok((path, gpu_errors))) = tokio::task::spawn_blocking(write).await {
                // The receiver is gone when the cluster has ended.
                let _ = events.send(Event::Bundled { slot, at, path, gpu_errors }).await;
            }
        });
    }
}

/// When the ended process was started, or slightly earlier.
fn since(shown: &ProcessState) -> SystemTime {
    let now = SystemTime::now();
    let ended = shown.last_exit.as_ref().and_then(|exit| humantime::parse_rfc3339(&exit.at).ok());
    let before_ready = shown.timings.ready_ms.unwrap_or_default();
    let margin = Duration::from_millis(before_ready) + Duration::from_secs(60);
    ended.unwrap_or(now).checked_sub(margin).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The environment of a process, without the variables that identify it within the cluster.
fn environment(spec: &ProcessSpec) -> impl Iterator<Item = (String, String)> {
    let inherited = std::env::vars_os().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    });
    inherited.chain(spec.program.env.clone())
}
