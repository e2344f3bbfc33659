//! How the two ends of a new connection find out that they speak the same protocol, that both know
//! the cluster's secret (if one is set), and whether each can read the other's memory or map it.
//!
//! Both ends send a [`Hello`] at once and answer the other's with a finish: a proof over both hellos
//! and the sender's role, and whether the sender could read the token at the address in the other's
//! hello. Sends nothing itself; random numbers and the outcome of that reading are arguments.
//!
//! *Invariant:* a proof is valid for one pair of hellos and one direction only.

/// Length of a hello, in bytes.
pub const HELLO: usize = 136;

/// Length of a finish, in bytes.
pub const FINISH: usize = 40;

/// Length of secrets, nonces, tokens and proofs, in bytes.
pub const LENGTH: usize = 32;

const MAGIC: [u8; 8] = *b"ccnative";
const VERSION: u32 = 2;
const HOST: usize = 47;

/// Which end of the connection a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It connected.
    Connector,
    /// It accepted.
    Listener,
}

/// What each end says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Which end it is.
    pub role: Role,
    /// Whether it has a secret, and so expects a proof.
    pub has_secret: bool,
    /// Whether it maps memory of its peer, and shares its own.
    pub maps: bool,
    /// Random.
    pub nonce: [u8; LENGTH],
    /// Where `token` lies in the sender's memory; 0 if its memory is not to be read.
    pub token_at: u64,
    /// Random, the same for all connections of a process.
    pub token: [u8; LENGTH],
    /// The host that the connector has connected to, which the listener may know by several names.
    pub host: String,
}

/// Why a greeting failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It doesn't begin as ours does.
    #[error("the peer does not speak native://")]
    Stranger,
    /// It does, in another version.
    #[error("the peer speaks version {0} of native://, and this process version {VERSION}")]
    Version(u32),
    /// Connected to itself, or nonsense.
    #[error("the peer sent a greeting that makes no sense")]
    Nonsense,
    /// One end has a secret, the other has none.
    #[error("{} a secret, and {} none", ends(*.peer).0, ends(*.peer).1)]
    OneSecret {
        /// Whether it is the peer that has one.
        peer: bool,
    },
    /// Both have one.
    #[error("the peer has another secret")]
    OtherSecret,
}

fn ends(peer: bool) -> (&'static str, &'static str) {
    if peer { ("the peer has", "this process has") } else { ("this process has", "the peer has") }
}

/// What has come of the bytes that were fed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// The peer's hello has arrived, and is to be answered with [`Greeting::finish`].
    Heard(Hello),
    /// The greeting is over; the peer can read this process's memory, or cannot.
    Done {
        /// Whether it can.
        peer_reads: bool,
    },
}

/// One end's side of a greeting.
#[derive(Debug)]
pub struct Greeting {
    own: Hello,
    secret: Option<[u8; LENGTH]>,
    bytes: Vec<u8>,
    peer: Option<[u8; HELLO]>,
}

impl Hello {
    fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12] = match self.role {
            Role::Connector => 0,
            Role::Listener => 1,
        };
        bytes[13] = u8::from(self.has_secret);
        bytes[14] = u8::from(self.maps);
        bytes[16..48].copy_from_slice(&self.nonce);
        bytes[48..56].copy_from_slice(&self.token_at.to_le_bytes());
        bytes[56..88].copy_from_slice(&self.token);
        let host = self.host.as_bytes();
        let len = host.len().min(HOST);
        bytes[88] = u8::try_from(len).unwrap_or(0);
        bytes[89..89 + len].copy_from_slice(&host[..len]);
        bytes
    }

    fn decode(bytes: &[u8; HELLO]) -> Result<Self, Refusal> {
        let array = |at: usize| {
            let mut part = [0; LENGTH];
            part.copy_from_slice(&bytes[at..at + LENGTH]);
            part
        };
        let role = match bytes[12] {
            0 => Role::Connector,
            1 => Role::Listener,
            _ => return Err(Refusal::Nonsense),
        };
        let host = bytes[89..].get(..usize::from(bytes[88])).ok_or(Refusal::Nonsense)?;
        let host = std::str::from_utf8(host).map_err(|_| Refusal::Nonsense)?;
        if host.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(Refusal::Nonsense);
        }
        let mut at = [0; 8];
        at.copy_from_slice(&bytes[48..56]);
        Ok(Self {
            role,
            has_secret: bytes[13] != 0,
            maps: bytes[14] != 0,
            nonce: array(16),
            token_at: u64::from_le_bytes(at),
            token: array(56),
            host: host.to_owned(),
        })
    }
}

impl Greeting {
    /// A greeting, and what is to be sent at once.
    pub fn new(own: Hello, secret: Option<[u8; LENGTH]>) -> (Self, [u8; HELLO]) {
        let hello = own.encode();
        (Self { own, secret, bytes: Vec::new(), peer: None }, hello)
    }

    /// Takes bytes of the peer from the front of `input`, and leaves those after the greeting.
    pub fn feed(&mut self, input: &mut &[u8]) -> Result<Step, Refusal> {
        let whole = if self.peer.is_none() { HELLO } else { FINISH };
        let (part, rest) = input.split_at(input.len().min(whole - self.bytes.len()));
        self.bytes.extend_from_slice(part);
        *input = rest;
        if self.peer.is_none() {
            // Strangers are recognised by their first bytes: they may never send as many as a hello.
            let known = self.bytes.len().min(MAGIC.len());
            if self.bytes[..known] != MAGIC[..known] {
                return Err(Refusal::Stranger);
            }
            if let Some(version) = self.bytes.get(8..12) {
                let version = version.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
                if version != VERSION {
                    return Err(Refusal::Version(version));
                }
            }
        }
        if self.bytes.len() < whole {
            return Ok(Step::More);
        }
        let bytes = std::mem::take(&mut self.bytes);
        match self.peer {
            None => self.hear(&bytes),
            Some(peer) => self.check(&bytes, &peer),
        }
    }

    /// Answers the peer's hello, and says whether this process could read the peer's token.
    ///
    /// # Panics
    ///
    /// If the peer's hello has not been heard.
    pub fn finish(&self, reads_peer: bool) -> [u8; FINISH] {
        let peer = self.peer.as_ref().expect("the peer's hello comes before the answer to it");
        let mut bytes = [0; FINISH];
        if let Some(secret) = &self.secret {
            let proof = prove(secret, self.own.role, &self.own.encode(), peer);
            bytes[..LENGTH].copy_from_slice(proof.as_bytes());
        }
        bytes[LENGTH] = u8::from(reads_peer);
        bytes
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<Step, Refusal> {
        let bytes: [u8; HELLO] = bytes.try_into().map_err(|_| Refusal::Nonsense)?;
        let hello = Hello::decode(&bytes)?;
        if hello.role == self.own.role || hello.nonce == self.own.nonce {
            return Err(Refusal::Nonsense);
        }
        if hello.has_secret != self.secret.is_some() {
            return Err(Refusal::OneSecret { peer: hello.has_secret });
        }
        self.peer = Some(bytes);
        Ok(Step::Heard(hello))
    }

    fn check(&self, finish: &[u8], peer: &[u8; HELLO]) -> Result<Step, Refusal> {
        if let Some(secret) = &self.secret {
            let role = match self.own.role {
                Role::Connector => Role::Listener,
                Role::Listener => Role::Connector,
            };
            let mut proof = [0; LENGTH];
            proof.copy_from_slice(&finish[..LENGTH]);
            // `blake3::Hash` compares in constant time.
            if prove(secret, role, peer, &self.own.encode()) != blake3::Hash::from(proof) {
                return Err(Refusal::OtherSecret);
            }
        }
        Ok(Step::Done { peer_reads: finish[LENGTH] != 0 })
    }
}

/// The proof of the end with this role, whose hello is `own`.
fn prove(secret: &[u8; LENGTH], role: Role, own: &[u8; HELLO], peer: &[u8; HELLO]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    hasher.update(match role {
        Role::Connector => b"native:// connector",
        Role::Listener => b"native:// listener ",
    });
    hasher.update(own).update(peer).finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(role: Role, secret: bool, nonce: u8) -> Hello {
        let host = "127.0.0.1".to_owned();
        let (nonce, token) = ([nonce; LENGTH], [9; LENGTH]);
        Hello { role, has_secret: secret, maps: true, nonce, token_at: 4096, token, host }
    }

    /// What both ends make of each other, in pieces of so many bytes.
    fn greet(one: Option<u8>, other: Option<u8>, piece: usize) -> [Result<Step, Refusal>; 2] {
        let end = |role, secret: Option<u8>, nonce| {
            let own = hello(role, secret.is_some(), nonce);
            Greeting::new(own, secret.map(|byte| [byte; LENGTH]))
        };
        let (mut a, from_a) = end(Role::Connector, one, 1);
        let (mut b, from_b) = end(Role::Listener, other, 2);
        let hear = |end: &mut Greeting, bytes: &[u8]| {
            let mut last = Ok(Step::More);
            for mut part in bytes.chunks(piece) {
                last = end.feed(&mut part);
                if last.is_err() {
                    break;
                }
            }
            last
        };
        let heard = [hear(&mut a, &from_b), hear(&mut b, &from_a)];
        if heard.iter().any(Result::is_err) {
            return heard;
        }
        let (from_a, from_b) = (a.finish(true), b.finish(false));
        [hear(&mut a, &from_b), hear(&mut b, &from_a)]
    }

    #[test]
    fn ends_with_the_same_secret_or_none_are_connected_and_say_whether_they_read_memory() {
        for secret in [None, Some(7)] {
            for piece in [1, 13, 1000] {
                let [a, b] = greet(secret, secret, piece);
                assert_eq!(a, Ok(Step::Done { peer_reads: false }));
                assert_eq!(b, Ok(Step::Done { peer_reads: true }));
            }
        }
    }

    #[test]
    fn another_secret_or_none_is_refused_by_both_ends() {
        let refused = || Err(Refusal::OtherSecret);
        assert_eq!(greet(Some(7), Some(8), 50), [refused(), refused()]);
        let [a, b] = greet(None, Some(8), 50);
        assert_eq!(a, Err(Refusal::OneSecret { peer: true }));
        assert_eq!(b, Err(Refusal::OneSecret { peer: false }));
        let text = "the peer has a secret, and this process has none";
        assert_eq!(Refusal::OneSecret { peer: true }.to_string(), text);
    }

    #[test]
    fn a_finish_sent_back_proves_nothing() {
        let secret = Some([7; LENGTH]);
        let (mut a, _) = Greeting::new(hello(Role::Connector, true, 1), secret);
        a.feed(&mut &hello(Role::Listener, true, 2).encode()[..]).unwrap();
        let own = a.finish(true);
        assert_eq!(a.feed(&mut &own[..]), Err(Refusal::OtherSecret));
    }

    #[test]
    fn strangers_are_known_by_their_first_bytes_and_other_versions_by_their_number() {
        let (mut a, hello) = Greeting::new(hello(Role::Connector, false, 1), None);
        assert_eq!(a.feed(&mut &b"GET / HTTP/1.1"[..]), Err(Refusal::Stranger));
        let (mut a, _) = Greeting::new(a.own.clone(), None);
        assert_eq!(a.feed(&mut &hello[..]), Err(Refusal::Nonsense), "its own hello");
        let mut newer = hello;
        newer[8] = 3;
        let (mut a, _) = Greeting::new(a.own.clone(), None);
        assert_eq!(a.feed(&mut &newer[..12]), Err(Refusal::Version(3)));
    }

    #[test]
    fn what_follows_the_greeting_is_left() {
        let (mut a, _) = Greeting::new(hello(Role::Connector, false, 1), None);
        let bytes = [&hello(Role::Listener, false, 2).encode()[..], &[0; FINISH], b"more"].concat();
        let mut input = &bytes[..];
        assert!(matches!(a.feed(&mut input), Ok(Step::Heard(_))));
        assert_eq!(a.feed(&mut input), Ok(Step::Done { peer_reads: false }));
        assert_eq!(input, b"more");
    }
}
