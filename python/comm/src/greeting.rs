//! How the two ends of a new connection find out that they speak the same protocol, that both know
//! the cluster's secret (if one is set), and whether each can read the other's memory or map it.
//!
//! The connector sends a [`Hello`] at once, the listener as soon as it hears something, and both answer
//! the other's with a finish: a proof over both hellos and the sender's role, and whether the sender
//! could read the token at the address in the other's hello. Sends nothing itself; random numbers and
//! the outcome of that reading are arguments.
//!
//! *Invariant:* a proof is valid for one pair of hellos and one direction only.

/// Length of a hello, in bytes.
pub const HELLO: usize = PREAMBLE.len() + 128;

/// Length of a finish, in bytes.
pub const FINISH: usize = 40;

/// Length of secrets, nonces, tokens and proofs, in bytes.
pub const LENGTH: usize = 32;

const VERSION: u32 = 2;
const HOST: usize = 47;

/// What whoever expects Dask's `tcp://` reads.
const TEXT: &[u8] = b"the peer speaks direct://, and this process another protocol; \
hint: give both ends an address that begins with direct://";

/// Of a message of `tcp://`: its value, in msgpack, whose parts refer to what follows, and what says
/// how that is read. Who reads objects finds one that its sender could not serialize, and raises the
/// text; who leaves them as they are (a scheduler) names it as what `dask` does not have.
const VALUE: &[u8] = b"\x82\xa6direct\x81\xae__Serialized__\x01\xa2or\x83\xa8__Enum__\xa0\
\xaa__module__\xa4dask\xa8__name__\xd9";
const READ_AS: &[u8] = b"\x82\xaaserializer\xa5error\xaenum-sub-frames\x01";

/// How a hello begins, in all versions: a whole message of Dask's `tcp://`, so that who speaks that
/// does not take our bytes for a length, and is told.
pub const PREAMBLE: [u8; 8 * 5 + VALUE.len() + 1 + TEXT.len() + READ_AS.len() + TEXT.len()] =
    preamble();

#[allow(clippy::cast_possible_truncation, reason = "the text is shorter than 256 bytes")]
const fn preamble<const LEN: usize>() -> [u8; LEN] {
    let value = VALUE.len() + 1 + TEXT.len();
    let lengths = [LEN - 8, 3, value, READ_AS.len(), TEXT.len()];
    let len = [TEXT.len() as u8];
    let parts: [&[u8]; 5] = [VALUE, &len, TEXT, READ_AS, TEXT];
    let mut bytes = [0; LEN];
    let mut at = 0;
    while at < lengths.len() {
        let length = (lengths[at] as u64).to_le_bytes();
        let mut byte = 0;
        while byte < 8 {
            bytes[8 * at + byte] = length[byte];
            byte += 1;
        }
        at += 1;
    }
    let (mut to, mut part) = (8 * lengths.len(), 0);
    while part < parts.len() {
        let mut from = 0;
        while from < parts[part].len() {
            bytes[to] = parts[part][from];
            (to, from) = (to + 1, from + 1);
        }
        part += 1;
    }
    bytes
}

/// What ends a TLS client's handshake with an error, instead of bytes that it can't make sense of: a
/// fatal alert, `no_application_protocol` (RFC 8446, section 6; RFC 7301, section 3.2).
const TLS_ALERT: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 120];

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
    /// It doesn't begin as ours does, but as a language that we know, perhaps.
    #[error("the peer {}", of_stranger(*.0))]
    Stranger(Option<&'static str>),
    /// It does, in another version.
    #[error("the peer speaks version {0} of direct://, and this process version {VERSION}")]
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

fn of_stranger(language: Option<&str>) -> String {
    match language {
        Some(language) => format!(
            "speaks {language}, and this process direct://; hint: give both ends an address that \
             begins with the same word"
        ),
        None => "does not speak direct://".to_owned(),
    }
}

/// A record of an alert or a handshake that is not empty, in any version since SSL 3.
fn is_tls(bytes: &[u8]) -> bool {
    matches!(bytes, [0x15 | 0x16, 3, 0..=4, high, low, ..] if high | low != 0)
}

/// Bytes by which every language that we know is known. A TLS alert is shorter, and some greet with
/// less: a language is named as soon as it is known, so the pieces in which bytes come do not matter.
const TELLING: usize = 8;

/// What a peer speaks that begins like this.
fn language(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        _ if is_tls(bytes) => Some("tls://"),
        [b'G', b'E', b'T', b' ', ..] | [b'H', b'T', b'T', b'P', ..] => Some("http://"),
        // A length of less than a TiB.
        [_, _, _, _, _, 0, 0, 0, ..] => Some("tcp:// of Dask"),
        _ => None,
    }
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
        let mut whole = [0; HELLO];
        let (preamble, bytes) = whole.split_at_mut(PREAMBLE.len());
        preamble.copy_from_slice(&PREAMBLE);
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[4] = match self.role {
            Role::Connector => 0,
            Role::Listener => 1,
        };
        bytes[5] = u8::from(self.has_secret);
        bytes[6] = u8::from(self.maps);
        bytes[8..40].copy_from_slice(&self.nonce);
        bytes[40..48].copy_from_slice(&self.token_at.to_le_bytes());
        bytes[48..80].copy_from_slice(&self.token);
        let host = self.host.as_bytes();
        let len = host.len().min(HOST);
        bytes[80] = u8::try_from(len).unwrap_or(0);
        bytes[81..81 + len].copy_from_slice(&host[..len]);
        whole
    }

    fn decode(bytes: &[u8; HELLO]) -> Result<Self, Refusal> {
        let bytes = &bytes[PREAMBLE.len()..];
        let array = |at: usize| {
            let mut part = [0; LENGTH];
            part.copy_from_slice(&bytes[at..at + LENGTH]);
            part
        };
        let role = match bytes[4] {
            0 => Role::Connector,
            1 => Role::Listener,
            _ => return Err(Refusal::Nonsense),
        };
        let host = bytes[81..].get(..usize::from(bytes[80])).ok_or(Refusal::Nonsense)?;
        let host = std::str::from_utf8(host).map_err(|_| Refusal::Nonsense)?;
        if host.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(Refusal::Nonsense);
        }
        let mut at = [0; 8];
        at.copy_from_slice(&bytes[40..48]);
        Ok(Self {
            role,
            has_secret: bytes[5] != 0,
            maps: bytes[6] != 0,
            nonce: array(8),
            token_at: u64::from_le_bytes(at),
            token: array(48),
            host: host.to_owned(),
        })
    }
}

impl Greeting {
    /// A greeting, and what a connector is to send at once.
    pub fn new(own: Hello, secret: Option<[u8; LENGTH]>) -> (Self, [u8; HELLO]) {
        let hello = own.encode();
        (Self { own, secret, bytes: Vec::new(), peer: None }, hello)
    }

    /// What a listener answers to a peer's first bytes.
    pub fn answer(&self, first: &[u8]) -> Vec<u8> {
        if is_tls(first) { TLS_ALERT.to_vec() } else { self.own.encode().to_vec() }
    }

    /// Takes bytes of the peer from the front of `input`, and leaves those after the greeting.
    pub fn feed(&mut self, input: &mut &[u8]) -> Result<Step, Refusal> {
        let whole = if self.peer.is_none() { HELLO } else { FINISH };
        let (part, rest) = input.split_at(input.len().min(whole - self.bytes.len()));
        self.bytes.extend_from_slice(part);
        *input = rest;
        if self.peer.is_none() {
            // Strangers are recognised by their first bytes: they may never send as many as a hello.
            let known = self.bytes.len().min(PREAMBLE.len());
            if self.bytes[..known] != PREAMBLE[..known] {
                let language = language(&self.bytes);
                if language.is_none() && self.bytes.len() < TELLING {
                    return Ok(Step::More);
                }
                return Err(Refusal::Stranger(language));
            }
            if let Some(version) = self.bytes.get(known..known + 4) {
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
        Role::Connector => b"direct:// connector",
        Role::Listener => b"direct:// listener ",
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
        assert_eq!(a.feed(&mut &b"GET / HTTP/1.1"[..]), Err(Refusal::Stranger(Some("http://"))));
        let (mut a, _) = Greeting::new(a.own.clone(), None);
        assert_eq!(a.feed(&mut &b"SSH-2.0-"[..]), Err(Refusal::Stranger(None)));
        let (mut a, _) = Greeting::new(a.own.clone(), None);
        assert_eq!(a.feed(&mut &hello[..]), Err(Refusal::Nonsense), "its own hello");
        let mut newer = hello;
        newer[PREAMBLE.len()] = 3;
        let (mut a, _) = Greeting::new(a.own.clone(), None);
        let begin = &newer[..PREAMBLE.len() + 4];
        assert_eq!(a.feed(&mut &begin[..]), Err(Refusal::Version(3)));
    }

    #[test]
    fn a_stranger_is_named_alike_whatever_the_pieces_in_which_it_speaks() {
        let dask = [0x16, 3, 1, 0, 0, 0, 0, 0];
        let named = [
            (&dask[..], Some("tcp:// of Dask")),
            (&TLS_ALERT, Some("tls://")),
            (b"\x16\x03\x01\x02\0\x01\0\x01\xfc", Some("tls://")),
            (b"HTTP/1.1 400 Bad Request", Some("http://")),
            (b"SSH-2.0-OpenSSH", None),
        ];
        for (bytes, language) in named {
            for piece in 1..=bytes.len() {
                let (mut a, _) = Greeting::new(hello(Role::Connector, false, 1), None);
                let said = bytes.chunks(piece).find_map(|mut part| a.feed(&mut part).err());
                assert_eq!(said, Some(Refusal::Stranger(language)), "in pieces of {piece}");
            }
        }
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
