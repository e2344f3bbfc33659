//! Receives the errors that the NVIDIA driver reports for GPUs, Xid events, and reads how busy the
//! GPUs are whenever it wakes up for that.
//!
//! Does not judge them; the code that handles a death asks for errors, and the history for use.
//!
//! *Invariant:* keeps the last [`KEPT`] errors and [`READINGS`] readings of a GPU; the thread ends
//! within [`PATIENCE`] of the drop of its [`XidWatch`], and nothing else wakes it up.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

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

/// Readings of a GPU's use to keep: the history asks every ten seconds.
const READINGS: usize = 8;

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
    /// How busy each GPU was, in percent.
    busy: Mutex<BTreeMap<GpuUuid, VecDeque<(Instant, u32)>>>,
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

    fn busy(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, VecDeque<(Instant, u32)>>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep_busy(&self, gpu: &GpuUuid, at: Instant, percent: u32) {
        let mut busy = self.busy();
        let readings = busy.entry(gpu.clone()).or_default();
        if readings.len() == READINGS {
            readings.pop_front();
        }
        readings.push_back((at, percent));
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

    /// In which share of the time a kernel ran on a GPU, in percent: each reading after a moment,
    /// of the driver's last sample before it. None of a GPU that NVML can't watch or doesn't tell.
    pub fn busy_since(&self, gpu: &GpuUuid, since: Instant) -> Vec<u32> {
        let busy = self.heard.busy();
        let readings = busy.get(gpu).into_iter().flatten();
        readings.filter(|(at, _)| *at > since).map(|(_, percent)| *percent).collect()
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
    let mut read_at = Instant::now();
    while !heard.over.load(Ordering::Relaxed) {
        // Errors may come faster than anybody wants to know.
        if read_at.elapsed() > PATIENCE / 2 {
            read_at = Instant::now();
            read_busy(nvml, gpus, heard);
        }
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

/// Reads how busy the GPUs are. One that does not tell, as a lost one, has no reading.
fn read_busy(nvml: &Nvml, gpus: &[GpuUuid], heard: &Heard) {
    for uuid in gpus {
        let rates = nvml.device_by_uuid(uuid.as_str()).and_then(|gpu| gpu.utilization_rates());
        if let Ok(rates) = rates {
            heard.keep_busy(uuid, Instant::now(), rates.gpu);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_of_a_gpu_is_told_since_a_moment_and_of_no_other() {
        let watch = XidWatch { heard: Arc::default() };
        let uuid = |last: u32| -> GpuUuid {
            format!("GPU-00000000-0000-0000-0000-00000000000{last}").parse().expect("a UUID")
        };
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        for second in 1..=20u32 {
            watch.heard.keep_busy(&uuid(1), at(second.into()), second);
        }
        assert_eq!(watch.busy_since(&uuid(1), at(18)), [19, 20]);
        assert_eq!(watch.busy_since(&uuid(1), began).len(), READINGS);
        assert_eq!(watch.busy_since(&uuid(1), at(20)), [0; 0], "nothing was read since");
        assert_eq!(watch.busy_since(&uuid(2), began), [0; 0], "nothing is known of it");
    }
}
