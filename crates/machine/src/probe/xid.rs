//! Receives the errors that the NVIDIA driver reports for GPUs: Xid events.
//!
//! Does not judge them; the code that handles a death asks for them.
//!
//! *Invariant:* keeps the last [`KEPT`] errors; the thread ends within [`PATIENCE`] of the drop of
//! its [`XidWatch`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError as Number;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};

use super::Options;
use super::nvml_library::{self, Opened};
use cuda_cluster_model::ids::GpuUuid;
use cuda_cluster_model::preflight::xid_meaning;

/// Maximum number of errors to keep.
const KEPT: usize = 256;

/// Longest wait for an event; an idle thread wakes this often.
const PATIENCE: Duration = Duration::from_secs(5);

/// An error reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidEvent {
    /// The GPU for which it was reported.
    pub gpu: GpuUuid,
    /// NVIDIA's number.
    pub xid: u64,
    /// When it was received.
    pub at: SystemTime,
}

impl XidEvent {
    /// The meaning of the number, from NVIDIA's *Xid Errors* guide.
    pub fn meaning(&self) -> &'static str {
        xid_meaning(self.xid)
    }
}

/// The receiving thread, which ends when this is dropped.
#[derive(Debug)]
pub struct XidWatch {
    heard: Arc<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    over: AtomicBool,
    events: Mutex<VecDeque<XidEvent>>,
}

impl Heard {
    fn events(&self) -> MutexGuard<'_, VecDeque<XidEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, event: XidEvent) {
        let mut events = self.events();
        if events.len() == KEPT {
            events.pop_front();
        }
        events.push_back(event);
    }
}

impl XidWatch {
    /// Starts to receive errors of these GPUs. GPUs that NVML can't watch (some virtual ones, MIG
    /// instances) are ignored; without a driver there are no errors.
    ///
    /// # Errors
    /// If the thread can't be started.
    pub fn start(options: &Options, gpus: Vec<GpuUuid>) -> std::io::Result<Self> {
        let heard = Arc::<Heard>::default();
        let (listener, libraries) = (Arc::clone(&heard), options.nvml.clone());
        let listen = move || {
            if let Ok(Opened::Working(nvml)) = nvml_library::open(&libraries) {
                listen(&nvml, &gpus, &listener);
            }
        };
        std::thread::Builder::new().name("xid".to_owned()).spawn(listen)?;
        Ok(Self { heard })
    }

    /// The errors of a GPU since a time, oldest first.
    pub fn since(&self, gpu: &GpuUuid, since: SystemTime) -> Vec<XidEvent> {
        let wanted = |event: &&XidEvent| event.gpu == *gpu && event.at >= since;
        self.heard.events().iter().filter(wanted).cloned().collect()
    }
}

impl Drop for XidWatch {
    fn drop(&mut self) {
        self.heard.over.store(true, Ordering::Relaxed);
    }
}

/// Receives errors until the watch is dropped or NVML has nothing to report.
fn listen(nvml: &Nvml, gpus: &[GpuUuid], heard: &Heard) {
    let Some(set) = registered(nvml, gpus) else { return };
    let patience = u32::try_from(PATIENCE.as_millis()).unwrap_or(u32::MAX);
    while !heard.over.load(Ordering::Relaxed) {
        match set.wait(patience) {
            Ok(event) => {
                let xid = match event.event_data {
                    Some(Number::Value(xid)) => xid,
                    Some(Number::Unknown) | None => continue,
                };
                if let Some(gpu) = spelt(&event.device) {
                    heard.keep(XidEvent { gpu, xid, at: SystemTime::now() });
                }
            }
            Err(NvmlError::Timeout) => {}
            // With a lost GPU the wait returns at once; the loss is detected elsewhere.
            Err(NvmlError::GpuLost) => std::thread::sleep(PATIENCE),
            Err(_) => return,
        }
    }
}

/// An event set for the GPUs that can be watched; `None` if there are none.
fn registered<'nvml>(nvml: &'nvml Nvml, gpus: &[GpuUuid]) -> Option<EventSet<'nvml>> {
    let mut set = nvml.create_event_set().ok()?;
    let mut any = false;
    for uuid in gpus {
        let Ok(gpu) = nvml.device_by_uuid(uuid.as_str()) else { continue };
        match gpu.register_events(EventTypes::CRITICAL_XID_ERROR, set) {
            Ok(more) => {
                set = more;
                any = true;
            }
            // An error of unknown cause consumes the set, so create one without these GPUs.
            Err(_) => return registered(nvml, &without(gpus, uuid)),
        }
    }
    any.then_some(set)
}

fn spelt(gpu: &Device<'_>) -> Option<GpuUuid> {
    gpu.uuid().ok()?.parse().ok()
}

fn without(gpus: &[GpuUuid], refused: &GpuUuid) -> Vec<GpuUuid> {
    gpus.iter().filter(|gpu| *gpu != refused).cloned().collect()
}
