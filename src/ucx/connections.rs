//! How often a worker has connected to each other worker.
//!
//! UCX numbers the connections between the same two workers, so that the endpoints which both
//! sides open for each other become one connection. The number has 16 bits
//! (`ucp_ep_match_conn_sn_t`) and stays at its last value, which means "not to be matched"
//! (`ucs_conn_match_get_next_sn`, openucx/ucx#7161; seen in 1.13 and 1.21). From then on every
//! request of the other side makes one more endpoint here ("remote-request" in UCX's log), for
//! which there is no handle: it cannot be closed, and holds two mappings of the other side's
//! shared memory. UCX's keep-alive finds out that nobody is at its other end, but looks at 128
//! endpoints in 20 s, and with 1.13 a connection made while it takes such endpoints away may never
//! come to be (seen with an interval of 100 ms). Faster reconnecting fills the process with
//! mappings, until `shmat` fails with "Cannot allocate memory" at `vm.max_map_count`, 65530. (UCX
//! gives the endpoint's handle with a message, on demand, but may free it any time:
//! openucx/ucx#6722.) So a worker ends before, and another takes its place: at two attempts a
//! second, after nine hours of nothing but broken connections.
//!
//! Does not see which connections are open.
//!
//! *Invariant:* a connection that UCX would not match is never begun.

use std::collections::HashMap;

use super::Error;

/// Counts connections, by the address that they lead to. Like UCX, it forgets none.
#[derive(Default)]
pub(super) struct Connections(HashMap<Vec<u8>, u16>);

impl Connections {
    /// Counts one more. UCX's numbers begin at 0, and the last is not one, so there are as many
    /// connections as the last number says.
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
    fn no_connection_is_begun_that_ucx_would_not_match() {
        let mut connections = Connections::default();
        assert!((0..0xffff).all(|_| connections.count(b"one").is_ok()));
        let refused = connections.count(b"one");
        assert!(matches!(refused, Err(Error::Exhausted { connections: 65_535 })), "{refused:?}");
        assert!(connections.count(b"other").is_ok(), "each has numbers of its own");
    }
}
