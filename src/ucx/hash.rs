//! A hash for keys that are numbers already: sequence numbers and random tokens.
//!
//! Does not withstand keys that an adversary inserts; it is for keys that this process makes or has
//! verified.
//!
//! *Invariant:* different numbers below 2⁶⁴ have different hashes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with numbers for keys.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Multiplies by the odd number next to 2⁶⁴ divided by the golden ratio (Knuth's multiplicative
/// hash), which spreads neighbours over the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        for byte in rest {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
