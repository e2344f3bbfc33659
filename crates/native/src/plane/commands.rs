//! The commands to the thread that owns UCX, and its reports.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::measure;
use super::transfer::{Request, TransferError};
use cuda_cluster_data::cuda::Device;
use cuda_cluster_data::ucx::{Buffer, Setting, thread};
use cuda_cluster_wire::native::{Measurement, Samples, ToWorker};
use cuda_cluster_wire::peer::{Measure, Member, PeerKey};
use cuda_cluster_wire::status::PeerLanes;

/// How to open UCX.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Which libucp; `None` for the loader's choice.
    pub library: Option<PathBuf>,
    /// Settings in addition to the environment's.
    pub settings: Vec<Setting>,
    /// The worker's device.
    pub device: Option<Device>,
    /// Most bytes that are received at the same time; further messages wait at their senders. A
    /// single message may exceed it.
    pub bytes_in_flight: u64,
}

/// Default limit of bytes that are received at the same time.
pub const BYTES_IN_FLIGHT: u64 = 256 << 20;

/// A report of the data plane.
#[derive(Debug)]
#[allow(missing_docs, reason = "a field that says nothing more has its name")]
pub enum Report {
    /// UCX is open; this is the worker's address, sealed.
    Open {
        address: Vec<u8>,
        /// The library's version, its name and its transports, for people.
        library: String,
        /// Its file, as far as the loader tells.
        path: PathBuf,
        /// What UCX has opened, `transport/device` each.
        resources: Vec<String>,
    },
    /// Every expected peer is reached, over these lanes.
    Ready(Vec<PeerLanes>),
    /// After READY, further peers are reached; these are the lanes to all.
    Grown(Vec<PeerLanes>),
    /// A connection broke although its peer was not reported lost.
    PeerFailed {
        member: Member,
        /// UCX's error.
        cause: String,
    },
    /// The thread still works: the answer to `Plane::pulse`.
    Pulse {
        /// The lanes of the connections now.
        lanes: Vec<PeerLanes>,
    },
    /// A measurement has ended.
    Measured {
        id: u64,
        /// What was measured, or why the measurement failed.
        result: Result<Samples, String>,
    },
}

/// A command to the thread.
pub(super) enum Command {
    FromScheduler(ToWorker),
    Put {
        name: String,
        buffer: Arc<Buffer>,
    },
    Remove {
        name: String,
    },
    Get(Request),
    Cancel {
        id: u64,
    },
    Summed {
        name: String,
        buffer: Arc<Buffer>,
        checksum: Option<u32>,
    },
    Echo {
        peer: String,
        reply: oneshot::Sender<Result<(), TransferError>>,
    },
    Measure {
        id: u64,
        measurement: Measurement,
    },
    /// Memory for a measurement of this worker.
    RoomToSend {
        id: u64,
        measurement: Measurement,
        room: Result<measure::RoomToSend, String>,
    },
    /// Memory for a peer's measurement.
    RoomToReceive {
        id: u64,
        from: PeerKey,
        measure: Measure,
        room: Option<measure::Room>,
        mapped: Option<Result<(), i32>>,
    },
    Pulse,
    Stop,
}

/// Sends commands to the thread and wakes it.
pub(super) type Inbox = thread::Inbox<Command>;

impl thread::Command for Command {
    /// Whoever waits for an answer learns it from the end of its channel.
    fn refuse(self, _reason: &str) {}
}
