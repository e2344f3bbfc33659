//! The messages that verify a connection: carries out what [`Core`](super::Core) decides.
//!
//! Does not decide which peer is trusted.
//!
//! *Invariant:* a probe is reported only if it arrived with the bytes that were sent.

use super::{Event, Owner};
use crate::plane::transfer::{Arrival, Purpose};
use crate::random;
use cuda_cluster_data::ucx::{self, Buffer, Payload};
use cuda_cluster_wire::peer::{Header, Hello, Kind, Member};

/// Length of the message that checks a new connection, in bytes: enough to use rendezvous.
const PROBE_BYTES: usize = 64 << 10;

impl Owner {
    /// Handles a message that verifies a connection.
    #[inline(never)]
    pub(super) fn proof(&mut self, sender: Member, header: Header, arrival: Arrival) {
        let Header { kind, argument, .. } = header;
        if kind != Kind::Probe {
            return self.handle(Event::Answered { by: sender, kind });
        }
        let name = sender.name.clone();
        let purpose = Purpose::Probe { by: Box::new(sender), checksum: argument };
        if let Err(error) = arrival.receive(Buffer::from(vec![0; PROBE_BYTES]), purpose) {
            tracing::warn!(peer = name, "{error}");
        }
    }

    #[inline(never)]
    pub(super) fn probed(
        &mut self,
        by: &Member,
        checksum: u64,
        result: Result<(), ucx::Status>,
        payload: &Payload,
    ) {
        let bytes = payload.buffer().and_then(Buffer::host).unwrap_or_default();
        match result {
            Ok(()) if u64::from(crc32c::crc32c(bytes)) == checksum => {
                self.handle(Event::Probed { by: by.clone() });
            }
            Ok(()) => tracing::error!(peer = by.name, "a probe arrived with the wrong checksum"),
            Err(status) => tracing::warn!(peer = by.name, %status, "a probe did not arrive"),
        }
    }

    /// Sends one of the messages that verify a connection.
    pub(super) fn greet(&self, to: &Member, kind: Kind) {
        let (argument, payload) = match kind {
            Kind::Hello => {
                let hello = Hello { from: self.core.me().clone() };
                (0, Payload::from(hello.encode()))
            }
            Kind::Probe => {
                let bytes = probe(to.incarnation);
                (u64::from(crc32c::crc32c(&bytes)), Payload::from(bytes))
            }
            _ => (0, Payload::Empty),
        };
        self.send(to.key(), kind, 0, argument, payload);
    }
}

/// Bytes that differ from zeroed memory and from every other probe.
fn probe(seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(PROBE_BYTES);
    while bytes.len() < PROBE_BYTES {
        state = random::following(state);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}
