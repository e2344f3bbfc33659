//! Worker addresses that go to other processes, and a count of the connections to each.
//!
//! Does not connect.
//!
//! *Invariant:* the bytes were packed by a UCX worker, here or in a process that knows the key.

use std::collections::HashMap;

use super::Error;

/// Length of the seal on a worker address.
const SEAL: usize = 32;

/// The address of a worker, as UCX packs it.
///
/// UCX trusts these bytes, so they only come from a worker, or from a sealed text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerAddress(Vec<u8>);

impl WorkerAddress {
    /// Wraps bytes from `ucp_worker_get_address`.
    pub(super) fn packed(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes to send to another process, sealed with a key that both know.
    pub fn seal(&self, key: &[u8; 32]) -> Vec<u8> {
        let mut sealed = blake3::keyed_hash(key, &self.0).as_bytes().to_vec();
        sealed.extend_from_slice(&self.0);
        sealed
    }

    /// Reads what [`WorkerAddress::seal`] wrote.
    ///
    /// # Errors
    /// If the bytes were not sealed with this key.
    pub fn open(sealed: &[u8], key: &[u8; 32]) -> Result<Self, Error> {
        let error = || Error::Address { bytes: sealed.len() };
        let (seal, address) = sealed.split_at_checked(SEAL).ok_or_else(error)?;
        let seal: [u8; SEAL] = seal.try_into().map_err(|_| error())?;
        // `blake3::Hash` compares in constant time.
        if address.is_empty() || blake3::keyed_hash(key, address) != blake3::Hash::from(seal) {
            return Err(error());
        }
        Ok(Self(address.to_vec()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Counts how often this worker has connected to each address. Like UCX, it never forgets one.
///
/// UCX numbers the connections between the same two workers, so that the endpoints which both sides
/// open for each other become one connection. The number has 16 bits (`ucp_ep_match_conn_sn_t`) and
/// stays at its last value, which means "not to be matched" (`ucs_conn_match_get_next_sn`,
/// openucx/ucx#7161; seen in 1.13 and 1.21). From then on every request of the other side creates
/// another endpoint here ("remote-request" in UCX's log) without a handle: it cannot be closed, and
/// holds two mappings of the other side's shared memory. UCX's keep-alive detects that its peer is
/// gone, but checks only 128 endpoints in 20 s, and with 1.13 a connection made while it removes
/// such endpoints may never be established (seen with an interval of 100 ms). Faster reconnecting
/// fills the process with mappings, until `shmat` fails with "Cannot allocate memory" at
/// `vm.max_map_count`, 65530. (UCX provides the endpoint's handle with a message on request, but
/// may free it any time: openucx/ucx#6722.) So a worker ends before that, and another takes its
/// place: at two attempts a second, after nine hours of nothing but broken connections.
///
/// *Invariant:* no connection is begun that UCX would not match.
#[derive(Default)]
pub(super) struct Connections(HashMap<Vec<u8>, u16>);

impl Connections {
    /// Counts one more. UCX's numbers begin at 0 and its last number is reserved, so the last
    /// number is also the number of possible connections.
    pub(super) fn count(&mut self, to: &[u8]) -> Result<(), Error> {
        let count = self.0.entry(to.to_owned()).or_default();
        *count = count.checked_add(1).ok_or(Error::Exhausted { connections: u16::MAX })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_only_under_the_key_that_sealed_it() {
        let address = WorkerAddress(vec![1, 2, 3]);
        let sealed = address.seal(&[7; 32]);
        assert_eq!(WorkerAddress::open(&sealed, &[7; 32]).ok(), Some(address));
        assert!(WorkerAddress::open(&sealed, &[8; 32]).is_err());
        for cut in 0..sealed.len() {
            assert!(WorkerAddress::open(&sealed[..cut], &[7; 32]).is_err());
        }
    }

    #[test]
    fn no_connection_is_begun_that_ucx_would_not_match() {
        let mut connections = Connections::default();
        assert!((0..0xffff).all(|_| connections.count(b"one").is_ok()));
        let refused = connections.count(b"one");
        assert!(matches!(refused, Err(Error::Exhausted { connections: 65_535 })), "{refused:?}");
        assert!(connections.count(b"other").is_ok(), "each has numbers of its own");
    }
}
