//! How both ends of a socket of the native engine prove that they belong to the same cluster, and
//! how the connecting side states its role.
//!
//! Pure: sends nothing, and random numbers are arguments.
//!
//! *Invariant:* a proof is valid for one direction, one [`Role`] and two nonces only.

use serde::{Deserialize, Serialize};

use super::secret::{LENGTH, Proof, Secret};

/// The version of all messages on these sockets.
pub const VERSION: u32 = 10;

/// Longest frame before both sides have authenticated, in bytes.
pub const GREETING_LIMIT: usize = 256;

/// The role of the connecting side, which determines the messages after the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// A worker at the scheduler. It sends one [`Registration`](super::native::Registration), then
    /// [`FromWorker`](super::native::FromWorker), and receives
    /// [`ToWorker`](super::native::ToWorker).
    Worker,
    /// A client at the scheduler. It sends [`FromClient`](super::native::FromClient) and receives
    /// [`ToClient`](super::native::ToClient).
    Client,
    /// A client or a worker that stores objects on a worker or fetches them from it. It sends
    /// [`Bulk`](super::tasks::Bulk) and receives [`BulkReply`](super::tasks::BulkReply).
    Bulk,
    /// A worker that reads a peer's objects where they are. It sends
    /// [`FromViewer`](super::tasks::FromViewer) and receives
    /// [`ToViewer`](super::tasks::ToViewer), some with a descriptor behind them.
    Viewer,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Role::Worker => "worker",
            Role::Client => "client",
            Role::Bulk => "bulk",
            Role::Viewer => "viewer",
        })
    }
}

/// The listener's first message. Its form never changes, so that every version can read the
/// version number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`VERSION`].
    pub version: u32,
    /// Random.
    pub nonce: [u8; LENGTH],
}

/// The connecting side's reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Its role.
    pub role: Role,
    /// Random.
    pub nonce: [u8; LENGTH],
    /// Over the role and both nonces.
    pub proof: Proof,
}

/// The listener's reply to a valid answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Over the role and both nonces, for another purpose.
    pub proof: Proof,
}

impl Challenge {
    /// A challenge of this version.
    pub fn new(nonce: [u8; LENGTH]) -> Self {
        Self { version: VERSION, nonce }
    }

    /// The answer of a side that knows the secret.
    pub fn answer(&self, secret: &Secret, role: Role, nonce: [u8; LENGTH]) -> Answer {
        Answer { role, nonce, proof: prove(secret, "from the connecting side", self, role, &nonce) }
    }
}

impl Answer {
    /// Whether it comes from a side that knows the secret.
    pub fn is_proven(&self, secret: &Secret, challenge: &Challenge) -> bool {
        *self == challenge.answer(secret, self.role, self.nonce)
    }

    /// The reply of a listener that knows the secret.
    pub fn welcome(&self, secret: &Secret, challenge: &Challenge) -> Welcome {
        Welcome { proof: prove(secret, "from the listener", challenge, self.role, &self.nonce) }
    }
}

impl Welcome {
    /// Whether it comes from a side that knows the secret.
    pub fn is_proven(&self, secret: &Secret, challenge: &Challenge, answer: &Answer) -> bool {
        *self == answer.welcome(secret, challenge)
    }
}

fn prove(
    secret: &Secret,
    purpose: &str,
    challenge: &Challenge,
    role: Role,
    nonce: &[u8; LENGTH],
) -> Proof {
    let role = role.to_string();
    secret.prove(purpose, &[role.as_bytes(), &challenge.nonce, nonce])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_proves_one_role_to_one_challenge() {
        let secret = Secret::new([3; LENGTH]);
        let challenge = Challenge::new([1; LENGTH]);
        let answer = challenge.answer(&secret, Role::Client, [2; LENGTH]);
        assert!(answer.is_proven(&secret, &challenge));
        assert!(!answer.is_proven(&Secret::new([4; LENGTH]), &challenge));
        assert!(!answer.is_proven(&secret, &Challenge::new([9; LENGTH])), "an old answer");
        let worker = Answer { role: Role::Worker, ..answer.clone() };
        assert!(!worker.is_proven(&secret, &challenge), "a client's answer with another role");
    }

    #[test]
    fn an_answer_sent_back_is_no_welcome() {
        let secret = Secret::new([3; LENGTH]);
        let challenge = Challenge::new([1; LENGTH]);
        let answer = challenge.answer(&secret, Role::Bulk, [2; LENGTH]);
        let welcome = answer.welcome(&secret, &challenge);
        assert!(welcome.is_proven(&secret, &challenge, &answer));
        assert!(!Welcome { proof: answer.proof }.is_proven(&secret, &challenge, &answer));
        let stranger = answer.welcome(&Secret::new([4; LENGTH]), &challenge);
        assert!(!stranger.is_proven(&secret, &challenge, &answer));
    }
}
