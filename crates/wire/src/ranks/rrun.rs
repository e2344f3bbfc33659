//! The language of RapidsMPF's ranks, the server's side.
//!
//! A rank says who it is and the token that only ranks know; then it puts values (rank 0 alone),
//! gets them, and meets the others.

use std::time::Duration;

use super::{Answer, Ask, Heard, LONGEST, LONGEST_NAME, Malformed, Session, Wait, line};
use crate::secret::Secret;

/// Longest line, as in RapidsMPF.
const LINE: usize = 512;

/// How a connection has begun.
#[derive(Clone, Debug)]
pub enum Greeted {
    /// A rank: write `OK` and go on with its session.
    Rank(Rrun),
    /// Somebody else, or a rank of another job: write this, and close.
    Refused(&'static str),
}

/// Reads a connection's first line; `None` while it is not there as a whole.
///
/// # Errors
/// If there is no end of the line within the longest one.
pub fn greeted(
    bytes: &mut Vec<u8>,
    size: u32,
    token: &Secret,
) -> Result<Option<Greeted>, Malformed> {
    let Some(said) = line(bytes, LINE)? else { return Ok(None) };
    let parsed = std::str::from_utf8(&said).ok().and_then(|text| {
        let mut words = text.strip_prefix("AUTH ")?.split_ascii_whitespace();
        let mut of = |name: &str| words.next()?.strip_prefix(name);
        let (rank, ranks) =
            (of("rank=")?.parse::<u32>().ok()?, of("nranks=")?.parse::<u32>().ok()?);
        Some((rank, ranks, of("token=")?.to_owned()))
    });
    Ok(Some(match parsed {
        None => Greeted::Refused("ERROR invalid AUTH\n"),
        Some((_, _, theirs)) if !is(&theirs, token) => Greeted::Refused("ERROR bad token\n"),
        Some((rank, ranks, _)) if rank >= size || ranks != size => {
            Greeted::Refused("ERROR invalid rank or nranks\n")
        }
        Some((rank, ..)) => Greeted::Rank(Rrun { rank, putting: None }),
    }))
}

/// Whether the text is this token, in constant time.
fn is(theirs: &str, token: &Secret) -> bool {
    let proof = |secret: &Secret| secret.prove("rrun", &[]);
    theirs.parse().is_ok_and(|theirs| proof(&theirs) == proof(token))
}

/// A rank that speaks RapidsMPF's language.
#[derive(Clone, Debug)]
pub struct Rrun {
    rank: u32,
    /// Name and length of a value whose bytes follow.
    putting: Option<(String, usize)>,
}

impl Rrun {
    fn command(&mut self, text: &str) -> Result<Heard, Malformed> {
        let mut words = text.split_ascii_whitespace();
        let command = words.next().unwrap_or_default();
        let mut of = |name: &str| words.next()?.strip_prefix(name).map(str::to_owned);
        let bad = |what: &'static str| Ok(Heard::Say(what.as_bytes().to_vec()));
        match command {
            "" => Ok(Heard::Nothing),
            "PUT" => {
                match (named(of("key=")), of("valuelen=").and_then(|text| text.parse().ok())) {
                    (Some(_), Some(length)) if length > LONGEST => {
                        Err(Malformed(format!("a value of {length} bytes")))
                    }
                    (Some(name), Some(length)) => {
                        self.putting = Some((name, length));
                        Ok(Heard::Nothing)
                    }
                    _ => bad("ERROR bad PUT\n"),
                }
            }
            "GET" => match (named(of("key=")), of("timeout=").and_then(|text| text.parse().ok())) {
                (Some(name), Some(wait)) => {
                    let wait = Wait::For(Duration::from_millis(wait));
                    Ok(Heard::Ask(Ask::Get { name, wait }))
                }
                _ => bad("ERROR bad GET\n"),
            },
            "BARRIER" => Ok(Heard::Ask(Ask::Meet { name: "barrier" })),
            "SYNC" => Ok(Heard::Ask(Ask::Meet { name: "sync" })),
            _ => bad("ERROR unknown command\n"),
        }
    }
}

fn named(name: Option<String>) -> Option<String> {
    name.filter(|name| !name.is_empty() && name.len() <= LONGEST_NAME)
}

impl Session for Rrun {
    fn hear(&mut self, bytes: &mut Vec<u8>) -> Result<Option<Heard>, Malformed> {
        if let Some((name, length)) = self.putting.take_if(|(_, length)| bytes.len() >= *length) {
            let value = bytes.drain(..length).collect();
            return Ok(Some(match self.rank {
                0 => Heard::Ask(Ask::Put { name, value }),
                _ => Heard::Say(b"ERROR only rank 0 may PUT\n".to_vec()),
            }));
        }
        if self.putting.is_some() {
            return Ok(None);
        }
        let Some(line) = line(bytes, LINE)? else { return Ok(None) };
        let text = std::str::from_utf8(&line).map_err(|_| Malformed::of("not in UTF-8", &line))?;
        self.command(text).map(Some)
    }

    fn answer(&mut self, answer: Answer) -> Vec<u8> {
        match answer {
            Answer::Done => b"OK\n".to_vec(),
            Answer::Missing => b"TIMEOUT\n".to_vec(),
            Answer::Refused(why) => format!("ERROR {why}\n").into_bytes(),
            Answer::Value(value) => {
                let mut said = format!("VALUE valuelen={}\n", value.len()).into_bytes();
                said.extend(value);
                said
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The token, and its text.
    fn token() -> (Secret, String) {
        (Secret::new([7; 32]), "07".repeat(32))
    }

    fn rank(rank: u32) -> Rrun {
        let (token, text) = token();
        let mut bytes = format!("AUTH rank={rank} nranks=2 token={text}\n").into_bytes();
        match greeted(&mut bytes, 2, &token) {
            Ok(Some(Greeted::Rank(rank))) if bytes.is_empty() => rank,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_ranks_of_the_job_are_let_in() {
        let (token, text) = token();
        for (said, answer) in [
            ("AUTH rank=0 nranks=2 token=00fe\n".to_owned(), "bad token"),
            (format!("AUTH rank=0 nranks=2 token={}\n", "08".repeat(32)), "bad token"),
            (format!("AUTH rank=2 nranks=2 token={text}\n"), "invalid rank"),
            (format!("AUTH rank=0 nranks=3 token={text}\n"), "invalid rank"),
            ("AUTH rank=0\n".to_owned(), "invalid AUTH"),
            ("GET / HTTP/1.1\n".to_owned(), "invalid AUTH"),
        ] {
            match greeted(&mut said.clone().into_bytes(), 2, &token) {
                Ok(Some(Greeted::Refused(why))) => assert!(why.contains(answer), "{said}: {why}"),
                other => panic!("{said}: {other:?}"),
            }
        }
        assert!(matches!(greeted(&mut b"AUTH".to_vec(), 2, &token), Ok(None)));
        assert!(greeted(&mut vec![b'A'; LINE + 1], 2, &token).is_err());
    }

    #[test]
    fn values_are_put_by_the_first_and_got_by_all() {
        let mut zero = rank(0);
        let mut bytes = b"PUT key=root valuelen=4\na\n".to_vec();
        assert_eq!(zero.hear(&mut bytes), Ok(Some(Heard::Nothing)));
        assert_eq!(zero.hear(&mut bytes), Ok(None), "half of the value is missing");
        bytes.extend(b"bcSYNC\n");
        let put = Ask::Put { name: "root".into(), value: b"a\nbc".to_vec() };
        assert_eq!(zero.hear(&mut bytes), Ok(Some(Heard::Ask(put))));
        assert_eq!(zero.answer(Answer::Done), b"OK\n");
        assert_eq!(zero.hear(&mut bytes), Ok(Some(Heard::Ask(Ask::Meet { name: "sync" }))));
        let mut one = rank(1);
        let mut bytes = b"GET key=root timeout=1500\n".to_vec();
        let get = Ask::Get { name: "root".into(), wait: Wait::For(Duration::from_millis(1500)) };
        assert_eq!(one.hear(&mut bytes), Ok(Some(Heard::Ask(get))));
        assert_eq!(one.answer(Answer::Value(b"a\nbc".to_vec())), b"VALUE valuelen=4\na\nbc");
        let mut bytes = b"PUT key=root valuelen=1\nx".to_vec();
        assert_eq!(one.hear(&mut bytes), Ok(Some(Heard::Nothing)));
        let refused = Heard::Say(b"ERROR only rank 0 may PUT\n".to_vec());
        assert_eq!(one.hear(&mut bytes), Ok(Some(refused)));
    }
}
