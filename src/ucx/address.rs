//! The address of a worker, on its way to another process.
//!
//! Does not reach anybody.
//!
//! *Invariant:* the bytes were packed by a UCX worker, here or in a process that knows the key.

use super::Error;

/// Length of the seal on a worker address.
const SEAL: usize = 32;

/// The address of a worker, as UCX packs it.
///
/// UCX trusts these bytes, so they are only ever made by a worker, or read back under a seal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAddress(Vec<u8>);

impl WorkerAddress {
    /// Of bytes that `ucp_worker_get_address` gave.
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
}
