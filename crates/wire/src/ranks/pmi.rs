//! PMI-1 and PMI-2, the server's side.
//!
//! Starts as PMI-1, whose messages are lines; a rank that asks for PMI-2 goes on with messages of a
//! stated length. All ranks are on one machine. Starting more processes and
//! published names are refused.

use std::collections::BTreeMap;

use super::{Answer, Ask, Heard, LONGEST, LONGEST_NAME, Malformed, Session, Wait, line};

/// Longest name, and longest value, that ranks are told they may use; those of MPICH's own server.
const LIMITS: &str = "kvsname_max=256 keylen_max=64 vallen_max=1024";
/// Longest value that is kept: far more than ranks are told.
const LONGEST_VALUE: usize = 64 << 10;
/// Digits in front of a message of PMI-2.
const DIGITS: usize = 6;
/// Begins the names of what PMI-2 keeps for a machine.
const OF_NODE: &str = "node/";

/// A rank that speaks PMI.
#[derive(Clone, Debug)]
pub struct Pmi {
    rank: u32,
    size: u32,
    /// Which of several programs it runs, by number.
    program: u32,
    job: String,
    second: bool,
    /// The command that waits for an answer.
    asked: Option<Message>,
}

/// A command with its attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Message {
    command: String,
    attributes: BTreeMap<String, String>,
}

impl Message {
    fn of(&self, name: &str) -> Result<&str, Malformed> {
        let value = self.attributes.get(name).map(String::as_str);
        value.ok_or_else(|| Malformed(format!("{} without {name}", self.command)))
    }

    fn value(&self) -> Result<Vec<u8>, Malformed> {
        let value = self.of("value")?;
        match value.len() <= LONGEST_VALUE {
            true => Ok(value.into()),
            false => Err(Malformed::of("a value that is too long", value.as_bytes())),
        }
    }

    fn name(&self, attribute: &str) -> Result<String, Malformed> {
        let name = self.of(attribute)?;
        match name.len() <= LONGEST_NAME {
            true => Ok(name.to_owned()),
            false => Err(Malformed::of("a name that is too long", name.as_bytes())),
        }
    }
}

impl Pmi {
    /// A rank of a job of this name, in which nobody reads a meaning, but which has no blanks.
    /// `program` counts the job's programs from 0: `MPI_APPNUM`.
    pub fn new(rank: u32, size: u32, program: u32, job: &str) -> Self {
        Self { rank, size, program, job: job.to_owned(), second: false, asked: None }
    }

    /// What every process manager knows of a job.
    fn known(&self, name: &str) -> Option<String> {
        match name {
            // Ranks by machine: from machine 0 on, one machine, that has all.
            "PMI_process_mapping" => Some(format!("(vector,(0,1,{}))", self.size)),
            "universeSize" | "PMI_universe_size" => Some(self.size.to_string()),
            _ => None,
        }
    }

    fn first(&mut self, message: Message) -> Result<Heard, Malformed> {
        let job = &self.job;
        Ok(match message.command.as_str() {
            "init" => {
                self.second = message.of("pmi_version")? == "2";
                let version = if self.second { "2 pmi_subversion=0" } else { "1 pmi_subversion=1" };
                say(&format!("cmd=response_to_init pmi_version={version} rc=0"))
            }
            "get_maxes" => say(&format!("cmd=maxes {LIMITS} rc=0")),
            "get_appnum" => say(&format!("cmd=appnum appnum={} rc=0", self.program)),
            "get_my_kvsname" => say(&format!("cmd=my_kvsname kvsname={job} rc=0")),
            "get_universe_size" => say(&format!("cmd=universe_size size={} rc=0", self.size)),
            "put" => {
                let (name, value) = (message.name("key")?, message.value()?);
                self.ask(message, Ask::Put { name, value })
            }
            "get" => match self.known(message.of("key")?) {
                Some(value) => say(&format!("cmd=get_result value={value} rc=0")),
                None => {
                    let name = message.name("key")?;
                    self.ask(message, Ask::Get { name, wait: Wait::No })
                }
            },
            "barrier_in" => self.ask(message, Ask::Meet { name: "barrier" }),
            "finalize" => say("cmd=finalize_ack rc=0"),
            // The rank ends with this status, and thereby the others.
            "abort" => Heard::Nothing,
            "spawn" => refused("spawn_result"),
            "publish_name" => refused("publish_result"),
            "unpublish_name" => refused("unpublish_result"),
            "lookup_name" => refused("lookup_result"),
            other => return Err(Malformed::of("no command of PMI-1", other.as_bytes())),
        })
    }

    fn second(&mut self, message: Message) -> Result<Heard, Malformed> {
        let done = |told: &str| Ok(Heard::Say(response(&message, told, 0)));
        match message.command.as_str() {
            "fullinit" => done(&format!(
                "pmi-version=2;pmi-subversion=0;rank={};size={};appnum={};debugged=FALSE;pmiverbose=FALSE;",
                self.rank, self.size, self.program
            )),
            "job-getid" => done(&format!("jobid={};", self.job)),
            "finalize" => done(""),
            "abort" => Ok(Heard::Nothing),
            "info-getjobattr" => match self.known(message.of("key")?) {
                Some(value) => done(&format!("found=TRUE;value={value};")),
                None => done("found=FALSE;"),
            },
            "kvs-put" => {
                let (name, value) = (message.name("key")?, message.value()?);
                Ok(self.ask(message, Ask::Put { name, value }))
            }
            "kvs-get" => {
                let name = message.name("key")?;
                Ok(self.ask(message, Ask::Get { name, wait: Wait::No }))
            }
            "kvs-fence" => Ok(self.ask(message, Ask::Meet { name: "barrier" })),
            "info-putnodeattr" => {
                let name = format!("{OF_NODE}{}", message.name("key")?);
                let value = message.value()?;
                Ok(self.ask(message, Ask::Put { name, value }))
            }
            "info-getnodeattr" => {
                let name = format!("{OF_NODE}{}", message.name("key")?);
                let waits = message.attributes.get("wait").is_some_and(|wait| is_true(wait));
                let wait = if waits { Wait::Forever } else { Wait::No };
                Ok(self.ask(message, Ask::Get { name, wait }))
            }
            "spawn" | "name-publish" | "name-unpublish" | "name-lookup" | "job-connect"
            | "job-disconnect" => {
                Ok(Heard::Say(response(&message, "errmsg=cuda-cluster does not do this;", 1)))
            }
            other => Err(Malformed::of("no command of PMI-2", other.as_bytes())),
        }
    }

    fn ask(&mut self, message: Message, ask: Ask) -> Heard {
        self.asked = Some(message);
        Heard::Ask(ask)
    }
}

impl Session for Pmi {
    fn hear(&mut self, bytes: &mut Vec<u8>) -> Result<Option<Heard>, Malformed> {
        if self.second {
            let Some(message) = stated_length(bytes)? else { return Ok(None) };
            return self.second(parse_second(&message)?).map(Some);
        }
        if bytes.starts_with(b"mcmd=") {
            // One or several commands over several lines, each up to this one.
            return Ok(spawn(bytes)?.then(|| refused("spawn_result")));
        }
        let Some(line) = line(bytes, LONGEST)? else { return Ok(None) };
        self.first(parse_first(&line)?).map(Some)
    }

    fn answer(&mut self, answer: Answer) -> Vec<u8> {
        let asked = self.asked.take().unwrap_or_default();
        if self.second {
            return match answer {
                Answer::Value(value) => {
                    let value = String::from_utf8_lossy(&value);
                    response(&asked, &format!("found=TRUE;value={value};"), 0)
                }
                Answer::Missing => response(&asked, "found=FALSE;", 0),
                Answer::Done => response(&asked, "", 0),
                Answer::Refused(why) => response(&asked, &format!("errmsg={why};"), 1),
            };
        }
        let command = match asked.command.as_str() {
            "barrier_in" => "barrier_out",
            "put" => "put_result",
            _ => "get_result",
        };
        let told = match answer {
            Answer::Value(value) => format!("value={} rc=0", String::from_utf8_lossy(&value)),
            Answer::Missing => "rc=1 msg=no_such_key value=unknown".to_owned(),
            Answer::Done => "rc=0".to_owned(),
            Answer::Refused(why) => format!("rc=1 msg={}", why.replace(' ', "_")),
        };
        format!("cmd={command} {told}\n").into_bytes()
    }
}

fn is_true(text: &str) -> bool {
    text.eq_ignore_ascii_case("true")
}

fn say(text: &str) -> Heard {
    Heard::Say(format!("{text}\n").into_bytes())
}

fn refused(command: &str) -> Heard {
    say(&format!("cmd={command} rc=1 msg=cuda-cluster_does_not_do_this"))
}

/// PMI-2's answer to a message, after the thread that waits for it.
fn response(message: &Message, told: &str, code: u32) -> Vec<u8> {
    let Message { command, attributes } = message;
    let thread = attributes.get("thrid").map_or(String::new(), |id| format!("thrid={id};"));
    let text = format!("cmd={command}-response;{thread}{told}rc={code};");
    format!("{:>DIGITS$}{text}", text.len()).into_bytes()
}

/// PMI-1's `cmd=put kvsname=1 key=a value=b`.
fn parse_first(line: &[u8]) -> Result<Message, Malformed> {
    let text = std::str::from_utf8(line).map_err(|_| Malformed::of("not in UTF-8", line))?;
    message(text.split(' '), line)
}

/// PMI-2's `cmd=kvs-put;key=a;value=b;`.
fn parse_second(bytes: &[u8]) -> Result<Message, Malformed> {
    let text = std::str::from_utf8(bytes).map_err(|_| Malformed::of("not in UTF-8", bytes))?;
    message(text.split(';'), bytes)
}

fn message<'a>(words: impl Iterator<Item = &'a str>, whole: &[u8]) -> Result<Message, Malformed> {
    let mut message = Message::default();
    for word in words.filter(|word| !word.is_empty()) {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        match name {
            "cmd" => value.clone_into(&mut message.command),
            _ => drop(message.attributes.insert(name.to_owned(), value.to_owned())),
        }
    }
    match message.command.is_empty() {
        true => Err(Malformed::of("no command", whole)),
        false => Ok(message),
    }
}

/// Takes a message of PMI-2 out of the front.
fn stated_length(bytes: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Malformed> {
    let Some(digits) = bytes.get(..DIGITS) else { return Ok(None) };
    let length = std::str::from_utf8(digits).ok().and_then(|text| text.trim().parse().ok());
    let length: usize = length.ok_or_else(|| Malformed::of("no length", bytes))?;
    if bytes.len() < DIGITS + length {
        return Ok(None);
    }
    let message = bytes[DIGITS..DIGITS + length].to_vec();
    bytes.drain(..DIGITS + length);
    Ok(Some(message))
}

/// Takes PMI-1's request for more processes out of the front, whether it is there as a whole.
fn spawn(bytes: &mut Vec<u8>) -> Result<bool, Malformed> {
    const END: &[u8] = b"endcmd\n";
    let number = |line: &[u8], name: &str| -> Option<u32> {
        std::str::from_utf8(line).ok()?.strip_prefix(name)?.trim().parse().ok()
    };
    let (mut at, mut wanted, mut seen) = (0, u32::MAX, 0);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        at += line.len();
        wanted = number(line, "totspawns=").unwrap_or(wanted);
        seen = number(line, "spawnssofar=").unwrap_or(seen);
        if line == END && seen >= wanted {
            bytes.drain(..at);
            return Ok(true);
        }
    }
    match bytes.len() > LONGEST {
        true => Err(Malformed::of("a request that is too long", bytes)),
        false => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(session: &mut Pmi, said: &str) -> Heard {
        let mut bytes = said.as_bytes().to_vec();
        let heard = session.hear(&mut bytes).expect("of this language").expect("as a whole");
        assert!(bytes.is_empty(), "{said}");
        heard
    }

    fn words(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).expect("text")
    }

    fn said(heard: Heard) -> String {
        match heard {
            Heard::Say(bytes) => words(bytes),
            other => panic!("{other:?}"),
        }
    }

    fn second(text: &str) -> String {
        format!("{:>6}{text}", text.len())
    }

    #[test]
    fn a_rank_of_mpich_finds_its_job() {
        let mut rank = Pmi::new(1, 2, 0, "run-7");
        let hello = told(&mut rank, "cmd=init pmi_version=1 pmi_subversion=1\n");
        assert_eq!(said(hello), "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n");
        let maxes = said(told(&mut rank, "cmd=get_maxes\n"));
        assert_eq!(maxes, "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0\n");
        assert_eq!(said(told(&mut rank, "cmd=get_appnum\n")), "cmd=appnum appnum=0 rc=0\n");
        assert!(said(told(&mut rank, "cmd=get_my_kvsname\n")).contains("kvsname=run-7 "));
        let mapping = told(&mut rank, "cmd=get kvsname=run-7 key=PMI_process_mapping\n");
        assert_eq!(said(mapping), "cmd=get_result value=(vector,(0,1,2)) rc=0\n");
        let put = told(&mut rank, "cmd=put kvsname=run-7 key=card-1 value=port#5$host#a=b\n");
        let wanted = Ask::Put { name: "card-1".into(), value: b"port#5$host#a=b".to_vec() };
        assert_eq!(put, Heard::Ask(wanted));
        assert_eq!(words(rank.answer(Answer::Done)), "cmd=put_result rc=0\n");
        let meet = told(&mut rank, "cmd=barrier_in\n");
        assert_eq!(meet, Heard::Ask(Ask::Meet { name: "barrier" }));
        assert_eq!(words(rank.answer(Answer::Done)), "cmd=barrier_out rc=0\n");
        told(&mut rank, "cmd=get kvsname=run-7 key=card-0\n");
        let value = rank.answer(Answer::Value(b"port#6".to_vec()));
        assert_eq!(words(value), "cmd=get_result value=port#6 rc=0\n");
        told(&mut rank, "cmd=get kvsname=run-7 key=none\n");
        assert!(words(rank.answer(Answer::Missing)).starts_with("cmd=get_result rc=1 "));
        assert_eq!(said(told(&mut rank, "cmd=finalize\n")), "cmd=finalize_ack rc=0\n");
    }

    #[test]
    fn a_rank_that_asks_for_pmi_2_gets_it() {
        let mut rank = Pmi::new(3, 8, 1, "j");
        let hello = told(&mut rank, "cmd=init pmi_version=2 pmi_subversion=0\n");
        assert_eq!(said(hello), "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n");
        let full = said(told(&mut rank, &second("cmd=fullinit;thrid=9;pmirank=3;")));
        assert!(full[6..].starts_with("cmd=fullinit-response;thrid=9;pmi-version=2;"), "{full}");
        assert!(full.contains(";rank=3;size=8;appnum=1;") && full.ends_with(";rc=0;"), "{full}");
        assert_eq!(full[..6].trim().parse::<usize>().expect("a length"), full.len() - 6);
        let wait = told(&mut rank, &second("cmd=info-getnodeattr;key=a;wait=TRUE;"));
        let wanted = Ask::Get { name: "node/a".into(), wait: Wait::Forever };
        assert_eq!(wait, Heard::Ask(wanted));
        assert!(
            words(rank.answer(Answer::Value(b"b c".to_vec()))).contains("found=TRUE;value=b c;")
        );
        told(&mut rank, &second("cmd=kvs-fence;"));
        let fence = words(rank.answer(Answer::Done));
        assert_eq!(&fence[6..], "cmd=kvs-fence-response;rc=0;");
    }

    #[test]
    fn what_is_not_done_is_refused_and_the_connection_goes_on() {
        let mut rank = Pmi::new(0, 1, 0, "j");
        let spawn = "mcmd=spawn\nnprocs=1\nexecname=a\ntotspawns=2\nspawnssofar=1\nendcmd\n";
        let mut bytes = spawn.as_bytes().to_vec();
        assert_eq!(rank.hear(&mut bytes), Ok(None), "the second is missing");
        bytes.extend(b"mcmd=spawn\nspawnssofar=2\nendcmd\ncmd=finalize\n");
        assert!(said(rank.hear(&mut bytes).expect("read").expect("whole")).contains("rc=1"));
        assert!(said(rank.hear(&mut bytes).expect("read").expect("whole")).contains("finalize"));
    }

    #[test]
    fn other_languages_end_the_connection() {
        for said in ["GET / HTTP/1.1\n", "cmd=put key=a\n", "cmd=\n", "\u{0}\n"] {
            let heard = Pmi::new(0, 1, 0, "j").hear(&mut said.as_bytes().to_vec());
            assert!(heard.is_err(), "{said}: {heard:?}");
        }
        let mut endless = vec![b'a'; LONGEST + 1];
        assert!(Pmi::new(0, 1, 0, "j").hear(&mut endless).is_err());
        let mut second = Pmi { second: true, ..Pmi::new(0, 1, 0, "j") };
        assert!(second.hear(&mut b"abcdef".to_vec()).is_err());
    }
}
