//! The cluster's secret, and proofs that a process knows it.
//!
//! Does not read or write the secret's file, and generates no random numbers.
//!
//! *Invariant:* a secret is never printed, and a proof is compared in constant time.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Length of secrets, nonces and proofs, in bytes.
pub const LENGTH: usize = 32;

/// The secret that only the processes of one cluster know: 32 bytes, as text 64 hexadecimal
/// digits.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; LENGTH]);

/// The text is not a secret. The error does not repeat the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the secret is not {} hexadecimal digits", 2 * LENGTH)]
pub struct SecretError;

/// A keyed hash over what is being proven. Comparison takes the same time wherever they differ.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Proof([u8; LENGTH]);

impl PartialEq for Proof {
    fn eq(&self, other: &Self) -> bool {
        // `blake3::Hash` compares in constant time.
        blake3::Hash::from(self.0) == blake3::Hash::from(other.0)
    }
}

impl Eq for Proof {}

impl Secret {
    /// A secret of these bytes, which must be random.
    pub fn new(bytes: [u8; LENGTH]) -> Self {
        Self(bytes)
    }

    /// Proves knowledge of the secret for one `purpose` over `parts`. Parts with the same
    /// concatenation but other boundaries have another proof.
    pub fn prove(&self, purpose: &str, parts: &[&[u8]]) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in std::iter::once(purpose.as_bytes()).chain(parts.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Proof(*hasher.finalize().as_bytes())
    }

    /// A key for one `purpose`, which does not reveal the secret.
    pub fn key(&self, purpose: &str) -> [u8; LENGTH] {
        self.prove(purpose, &[]).0
    }
}

impl Proof {
    /// The beginning of the proof, for uses where it must be short.
    pub fn token(&self) -> Token {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        Token(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
    }
}

/// A short proof, which every message of a connection carries. At ten million guesses a second,
/// the most that shared memory can carry, guessing one of 2⁶⁴ takes tens of thousands of years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl FromStr for Secret {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let digits = text.trim_end().as_bytes();
        if digits.len() != 2 * LENGTH {
            return Err(SecretError);
        }
        let mut bytes = [0; LENGTH];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Result<u8, SecretError> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        b'A'..=b'F' => Ok(digit - b'A' + 10),
        _ => Err(SecretError),
    }
}

impl Secret {
    /// The text for the secret's file. Not `Display`, so that no log line prints it by accident.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_secret_survives_its_text(bytes in any::<[u8; LENGTH]>()) {
            let secret = Secret::new(bytes);
            prop_assert_eq!(secret.to_hex().parse(), Ok(secret));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,80}") {
            let _ = text.parse::<Secret>();
        }
    }

    #[test]
    fn parts_are_not_run_together() {
        let secret = Secret::new([1; LENGTH]);
        let one = secret.prove("p", &[b"ab", b"c"]);
        assert_eq!(one, secret.prove("p", &[b"ab", b"c"]));
        assert_ne!(one, secret.prove("p", &[b"a", b"bc"]));
        assert_ne!(one, secret.prove("pa", &[b"b", b"c"]));
        assert_ne!(one, Secret::new([2; LENGTH]).prove("p", &[b"ab", b"c"]));
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret::new([7; LENGTH])), "Secret(…)");
    }
}
