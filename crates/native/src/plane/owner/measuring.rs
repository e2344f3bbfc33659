//! Carries out the measurements that [`Measurements`](super::Measurements) decides on.
//!
//! Does not count messages or time.
//!
//! *Invariant:* the thread is pinned only during a measurement.

use std::sync::{Arc, Mutex, PoisonError};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::{ECHO, Owner};
use crate::plane::commands::{Command, Report};
use crate::plane::measure::{self, Ended, Out, RoomToSend};
use cuda_cluster_data::ucx::{self, Payload};
use cuda_cluster_wire::native::{Measurement, Protocol};
use cuda_cluster_wire::peer::{Kind, Member, PeerKey};

/// Does work on a thread of its own; where no more threads can be started, on this one, which is
/// slower.
fn beside(name: &str, work: impl FnOnce() + Send + 'static) {
    // A thread that can't be started takes its work with it, so both hold it.
    let work = Arc::new(Mutex::new(Some(work)));
    let shared = Arc::clone(&work);
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let run = move || {
        if let Some(work) = take(&shared) {
            work();
        }
    };
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if started.is_err()
        && let Some(work) = take(&work)
    {
        work();
    }
}

impl Owner {
    pub(super) fn measure(&mut self, id: u64, measurement: Measurement) {
        if id >= ECHO {
            let reason = format!("no measurement has the number {id}");
            return self.report(Ended::early(id, reason));
        }
        let device = self.device.clone();
        self.aside(move || {
            let room = measure::memory_to_send(&measurement, device.as_ref());
            Command::RoomToSend { id, measurement, room }
        });
    }

    pub(super) fn begin_measurement(
        &mut self,
        id: u64,
        measurement: Measurement,
        room: Result<RoomToSend, String>,
    ) {
        let peer = self.connected(&measurement.to);
        let no_peer = || format!("there is no connection to {}", measurement.to);
        match peer.ok_or_else(no_peer).and_then(|peer| Ok((peer, room?))) {
            // To the peer this worker may still be a stranger, who is not answered.
            Ok((peer, room)) if !self.core.is_proven(&peer) => {
                self.early_measurements.push((id, measurement, room));
            }
            Ok((peer, room)) => {
                self.pin(measurement.cpus.map(|(sender, _)| sender));
                let out = self.measurements.begin(id, peer.key(), measurement, room);
                self.send_one(out);
            }
            Err(reason) => self.report(Ended::early(id, reason)),
        }
    }

    /// Begins the measurements that waited until the connection to a peer was verified.
    pub(super) fn measure_early(&mut self, peer: &Member) {
        for (id, measurement, room) in self.take_early(peer) {
            self.begin_measurement(id, measurement, Ok(room));
        }
    }

    /// Ends the measurements that wait for a peer that is gone.
    pub(super) fn drop_early_measurements(&mut self, peer: &Member, cause: &str) {
        for (id, ..) in self.take_early(peer) {
            self.report(Ended::early(id, format!("{}: {cause}", peer.name)));
        }
    }

    fn take_early(&mut self, peer: &Member) -> Vec<(u64, Measurement, RoomToSend)> {
        self.early_measurements.extract_if(.., |(_, one, _)| one.to == peer.name).collect()
    }

    /// A ping has arrived in device memory.
    pub(super) fn pinged(&mut self, from: PeerKey, id: u64, payload: Payload) {
        if let Some(out) = self.measurements.pinged(from, id, payload.into_owned()) {
            self.send_one(out);
        }
    }

    /// An echo has arrived in device memory.
    pub(super) fn echoed(&mut self, id: u64, payload: Payload) {
        if let Some(by) = self.measurements.echoed(id, payload.into_owned()) {
            self.measured(id, by, Kind::Pong, 0);
        }
    }

    /// Does slow work on a thread of its own, which sends the result back to this one.
    #[inline(never)]
    pub(super) fn aside(&self, work: impl FnOnce() -> Command + Send + 'static) {
        let inbox = Arc::clone(&self.inbox);
        beside("plane aside", move || inbox.send(work()));
    }

    pub(super) fn measured(&mut self, id: u64, by: PeerKey, kind: Kind, argument: u64) {
        let device = &self.device;
        let words = |code| device.as_ref().map_or(String::new(), |device| device.error_text(code));
        let out = &mut self.outbox;
        let ended = self.measurements.answered(id, by, kind, argument, words, out);
        self.send_out();
        if let Some(ended) = ended {
            self.report(ended);
            self.unpin_when_idle();
        }
    }

    pub(super) fn report(&self, Ended { id, peer, device_bytes, mapped, result }: Ended) {
        let link = peer.and_then(|peer| self.links.get(&peer));
        let text = link.and_then(|link| link.endpoint.description().ok()).unwrap_or_default();
        let lanes = ucx::parse_lanes(&text);
        let protocol = device_bytes.and_then(|bytes| ucx::parse_device_protocol(&text, bytes));
        let protocol = protocol.map(|(name, lanes)| Protocol { name, lanes });
        let result = measure::samples(result, lanes, protocol, mapped);
        let _ = self.reports.send(Report::Measured { id, result });
    }

    pub(super) fn send_out(&mut self) {
        let mut outbox = std::mem::take(&mut self.outbox);
        for out in outbox.drain(..) {
            self.send_one(out);
        }
        self.outbox = outbox;
    }

    pub(super) fn send_one(&self, Out { to, kind, id, argument, payload }: Out) {
        self.send(to, kind, id, argument, payload);
    }

    /// Keeps this thread on one CPU until the last measurement ends.
    pub(super) fn pin(&mut self, cpu: Option<u32>) {
        let Some(cpu) = cpu.and_then(|cpu| usize::try_from(cpu).ok()) else { return };
        let this = Pid::from_raw(0);
        if self.unpinned.is_none() {
            self.unpinned = sched_getaffinity(this).ok();
        }
        let mut only = CpuSet::new();
        let pinned = only.set(cpu).and_then(|()| sched_setaffinity(this, &only));
        if let Err(error) = pinned {
            tracing::warn!(cpu, %error, "cannot pin the UCX thread for a measurement");
        }
    }

    pub(super) fn unpin_when_idle(&mut self) {
        if self.measurements.active() {
            return;
        }
        if let Some(before) = self.unpinned.take() {
            // The set was in force before, so this fails only if a CPU was removed since.
            let _ = sched_setaffinity(Pid::from_raw(0), &before);
        }
    }
}
