//! Asks the RAS of a job's NCCL, over the socket that each of its processes would serve.
//!
//! Understands no answer; `wires::ras` does. The protocol is that of `ncclras` (NCCL 2.24 to 2.31,
//! `src/ras/client.cc`): lines of text, each with a line as its answer, then the status.
//!
//! *Invariant:* it is over in time, and reads no more than the limit, whoever is at the other end.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Where RAS listens if `NCCL_RAS_ADDR` says nothing else.
pub const ADDRESS: &str = "localhost:28028";

/// How long to wait, and how much to read.
#[derive(Clone, Copy, Debug)]
pub struct RasLimits {
    /// For a connection, and for each answer to a setting.
    pub each: Duration,
    /// For the status: RAS waits for the other processes of the job.
    pub status: Duration,
    pub bytes: usize,
}

impl Default for RasLimits {
    fn default() -> Self {
        Self { each: Duration::from_secs(1), status: Duration::from_secs(12), bytes: 4 << 20 }
    }
}

/// Why RAS has not answered.
#[derive(Debug, thiserror::Error)]
pub enum RasError {
    #[error("{address} is not an address: HOST:PORT")]
    Address {
        address: String,
        #[source]
        source: std::io::Error,
    },
    #[error("nothing listens at {address}")]
    Connect {
        address: String,
        #[source]
        source: std::io::Error,
    },
    #[error("what listens at {address} did not answer within {}", humantime::format_duration(*.within))]
    Silent { address: String, within: Duration },
    #[error("what listens at {address} has closed the connection without an answer")]
    Closed { address: String },
    #[error("what listens at {address} is not NCCL's RAS: it has answered {said:?}")]
    Stranger { address: String, said: String },
    #[error("the answer of {address} has more than {limit} bytes")]
    TooLong { address: String, limit: usize },
    #[error("the connection to {address} has failed")]
    Broken {
        address: String,
        #[source]
        source: std::io::Error,
    },
}

impl RasError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Address { .. } => "for example localhost:28028",
            Self::Connect { .. } => {
                "RAS is in NCCL since 2.24, and listens on each machine of the job while it runs, \
                 unless NCCL_RAS_ENABLE is 0; NCCL_RAS_ADDR says where, if not at localhost:28028"
            }
            Self::Stranger { .. } => "NCCL_RAS_ADDR says where the job's RAS listens",
            _ => return None,
        };
        Some(text.to_owned())
    }
}

/// RAS's status: as JSON where NCCL can (2.28.7), else as text.
pub fn ask(address: &str, limits: RasLimits) -> Result<String, RasError> {
    let mut line = Line::connect(address, limits)?;
    let hello = line.answer("CLIENT PROTOCOL 2")?;
    if !hello.to_ascii_uppercase().starts_with("SERVER PROTOCOL ") {
        return Err(line.stranger(hello));
    }
    // RAS itself waits so long for the other processes, and as long again for late ones.
    let patience = limits.status.as_secs() / 4;
    for setting in [format!("TIMEOUT {}", patience.max(1)), "SET FORMAT json".to_owned()] {
        let said = line.answer(&setting)?;
        // An older NCCL does not know formats, and goes on.
        if said != "OK" && !said.starts_with("ERROR") {
            return Err(line.stranger(said));
        }
    }
    line.status()
}

/// A connection, with what has come and was not taken.
struct Line {
    address: String,
    stream: TcpStream,
    limits: RasLimits,
    come: Vec<u8>,
}

impl Line {
    fn connect(address: &str, limits: RasLimits) -> Result<Self, RasError> {
        let address = address.to_owned();
        let places = match address.to_socket_addrs() {
            Ok(places) => places.collect::<Vec<SocketAddr>>(),
            Err(source) => return Err(RasError::Address { address, source }),
        };
        let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
        for place in places {
            match TcpStream::connect_timeout(&place, limits.each) {
                Ok(stream) => return Ok(Self { address, stream, limits, come: Vec::new() }),
                Err(source) => last = source,
            }
        }
        Err(RasError::Connect { address, source: last })
    }

    /// Says a line, and takes the line that comes back.
    fn answer(&mut self, words: &str) -> Result<String, RasError> {
        self.say(words)?;
        let until = Instant::now() + self.limits.each;
        loop {
            if let Some(end) = self.come.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.come.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            // No answer to a setting is long.
            if self.come.len() > LONGEST_LINE {
                let said = String::from_utf8_lossy(&self.come).into_owned();
                return Err(self.stranger(said));
            }
            if !self.more(until, self.limits.each)? {
                return Err(RasError::Closed { address: self.address.clone() });
            }
        }
    }

    /// The rest: RAS closes the connection behind it.
    fn status(mut self) -> Result<String, RasError> {
        self.say("VERBOSE STATUS")?;
        let until = Instant::now() + self.limits.status;
        while self.more(until, self.limits.status)? {
            if self.come.len() > self.limits.bytes {
                let limit = self.limits.bytes;
                return Err(RasError::TooLong { address: self.address, limit });
            }
        }
        if self.come.is_empty() {
            return Err(RasError::Closed { address: self.address });
        }
        Ok(String::from_utf8_lossy(&self.come).into_owned())
    }

    fn say(&mut self, words: &str) -> Result<(), RasError> {
        let sent = self
            .stream
            .set_write_timeout(Some(self.limits.each))
            .and_then(|()| self.stream.write_all(format!("{words}\n").as_bytes()));
        sent.map_err(|source| self.failed(source, self.limits.each))
    }

    /// Takes what comes; `false` at the end.
    fn more(&mut self, until: Instant, within: Duration) -> Result<bool, RasError> {
        let mut piece = [0; 16 << 10];
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RasError::Silent { address: self.address.clone(), within });
        }
        let read = self
            .stream
            .set_read_timeout(Some(left))
            .and_then(|()| self.stream.read(&mut piece))
            .map_err(|source| self.failed(source, within))?;
        self.come.extend_from_slice(piece.get(..read).unwrap_or_default());
        Ok(read > 0)
    }

    fn failed(&self, source: std::io::Error, within: Duration) -> RasError {
        let address = self.address.clone();
        match source.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => RasError::Silent { address, within },
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => RasError::Closed { address },
            _ => RasError::Broken { address, source },
        }
    }

    fn stranger(&self, said: String) -> RasError {
        let said = said.chars().take(60).collect();
        RasError::Stranger { address: self.address.clone(), said }
    }
}

/// The longest line that is waited for the end of.
const LONGEST_LINE: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;

    /// How a made-up server behaves.
    #[derive(Clone, Copy, PartialEq)]
    enum Server {
        /// As NCCL 2.29 does (`src/ras/client_support.cc`).
        Json,
        /// As NCCL 2.24 does, which knows no formats.
        Text,
        StallsAtOnce,
        StallsInTheStatus,
        Garbage,
        Closes,
        ClosesInTheStatus,
        NeverEnds,
        NoNewline,
    }

    const STATUS: &str = "Job summary\n===========\n";

    /// Serves one client; what it has heard.
    fn serve(server: Server) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let lines = BufReader::new(stream.try_clone().expect("a second end")).lines();
            let mut heard = Vec::new();
            for line in lines.map_while(Result::ok) {
                heard.push(line.clone());
                let Some(answer) = answer(server, &line) else { break };
                if stream.write_all(answer.as_bytes()).is_err() {
                    break;
                }
                if line == "VERBOSE STATUS" && server != Server::StallsInTheStatus {
                    break;
                }
            }
            heard
        });
        (address, thread)
    }

    /// What it says to a line; `None`: it closes the connection.
    fn answer(server: Server, line: &str) -> Option<String> {
        let said = match (server, line) {
            (Server::StallsAtOnce, _) => "",
            (Server::Garbage, _) => "SSH-2.0-OpenSSH_9.6\r\n",
            (Server::Closes, _) => return None,
            (Server::NoNewline, _) => return Some("x".repeat(LONGEST_LINE * 2)),
            (_, "CLIENT PROTOCOL 2") => "SERVER PROTOCOL 2\n",
            (Server::Text, "SET FORMAT json") => "ERROR: Unknown command SET FORMAT json\n",
            (_, "SET FORMAT json") => "OK\n",
            (Server::StallsInTheStatus, "VERBOSE STATUS") => "Job summary\n",
            (Server::ClosesInTheStatus, "VERBOSE STATUS") => return None,
            (Server::Json, "VERBOSE STATUS") => "{\"nccl_version\": \"2.29.1\"}\n",
            (Server::NeverEnds, "VERBOSE STATUS") => return Some("x".repeat(1 << 20)),
            (_, "VERBOSE STATUS") => STATUS,
            (_, line) if line.starts_with("TIMEOUT ") => "OK\n",
            _ => "ERROR: Unknown command\n",
        };
        Some(said.to_owned())
    }

    fn asked(server: Server) -> (Result<String, RasError>, Vec<String>) {
        let (address, thread) = serve(server);
        let each = Duration::from_millis(300);
        let limits = RasLimits { each, status: each, bytes: 100_000 };
        let answer = ask(&address, limits);
        (answer, thread.join().expect("the server has ended"))
    }

    #[test]
    fn the_status_comes_as_json_or_from_older_ones_as_text() {
        let (answer, heard) = asked(Server::Json);
        assert_eq!(answer.expect("an answer"), "{\"nccl_version\": \"2.29.1\"}\n");
        assert_eq!(heard, ["CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "VERBOSE STATUS"]);
        assert_eq!(asked(Server::Text).0.expect("an answer"), STATUS);
    }

    #[test]
    fn who_does_not_answer_is_left() {
        for server in [Server::StallsAtOnce, Server::StallsInTheStatus] {
            let begun = Instant::now();
            let error = asked(server).0.expect_err("it stalls");
            assert!(matches!(error, RasError::Silent { .. }), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn who_is_not_ras_or_closes_or_never_ends_is_told_of() {
        let told = |server| asked(server).0.expect_err("it is no RAS").to_string();
        assert!(told(Server::Garbage).ends_with("it has answered \"SSH-2.0-OpenSSH_9.6\""));
        assert!(told(Server::NoNewline).contains("is not NCCL's RAS"));
        for server in [Server::Closes, Server::ClosesInTheStatus] {
            assert!(told(server).ends_with("has closed the connection without an answer"));
        }
        assert!(told(Server::NeverEnds).ends_with("has more than 100000 bytes"));
    }

    #[test]
    fn where_nothing_listens_there_is_a_hint() {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it");
        let error = ask(&port.to_string(), RasLimits::default()).expect_err("nobody is there");
        assert!(matches!(error, RasError::Connect { .. }), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("NCCL_RAS_ADDR")));
        let error = ask("no address", RasLimits::default()).expect_err("it is none");
        assert!(matches!(error, RasError::Address { .. }), "{error}");
    }
}
