//! Where ranks find each other in the languages of MPI's and RAPIDS' launchers.
//!
//! MPI's ranks have a connection to a Unix socket of the run directory when they begin
//! (`PMI_FD`), which the shim makes; RapidsMPF's connect to a port of loopback and say a token. The
//! messages are `wire::ranks`, the answers `board`'s.
//!
//! *Invariant:* nothing is read of who is neither of this user nor knows the token but one line.

mod board;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};

use board::{Board, Client, Due};
use cuda_cluster_machine::os::own_user::OwnUser;
use cuda_cluster_model::plan::Connection;
use cuda_cluster_wire::ranks::{self, Answer, Ask, Greeted, Heard, Pmi, Session, Wait};
use cuda_cluster_wire::secret::Secret;

/// The variable of an open connection to a process manager.
const PMI_FD: &str = "PMI_FD";
/// How long somebody may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(2);
/// Connections at a time that have not said yet who they are.
const STRANGERS: usize = 64;
/// Pause after a connection that can't be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Both listeners, before anybody has come.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    mpi: OwnUser,
    rapids: TcpListener,
    told: Told,
}

/// What ranks are told of it.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    socket: PathBuf,
    address: SocketAddr,
    token: Secret,
    /// Each rank's program, by number.
    programs: Vec<u32>,
    job: String,
}

impl Told {
    fn ranks(&self) -> u32 {
        u32::try_from(self.programs.len()).unwrap_or(u32::MAX)
    }

    /// The connections that a rank finds open: MPI's.
    pub(crate) fn connections(&self, rank: u32) -> BTreeMap<String, Connection> {
        let greeting = format!("rank={rank}\n");
        let connection = Connection { socket: self.socket.clone(), greeting };
        BTreeMap::from([(PMI_FD.to_owned(), connection)])
    }

    /// RapidsMPF's variables for a rank.
    pub(crate) fn rrun(&self, rank: u32) -> [(&'static str, String); 4] {
        [
            ("RRUN_RANK", rank.to_string()),
            ("RRUN_NRANKS", self.ranks().to_string()),
            ("RRUN_SOCKET_ADDR", self.address.to_string()),
            ("RRUN_SOCKET_TOKEN", self.token.to_hex()),
        ]
    }
}

impl Rendezvous {
    /// Listens for the ranks of a job of this name, which run these of its programs, by number.
    ///
    /// # Errors
    /// If the socket can't be made, or there is no free port.
    pub(crate) async fn open(
        socket: &Path,
        job: &str,
        programs: Vec<u32>,
        token: Secret,
    ) -> io::Result<Self> {
        let mpi = OwnUser::bind(socket)?;
        let rapids = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (address, socket) = (rapids.local_addr()?, socket.to_owned());
        let told = Told { socket, address, token, programs, job: job.to_owned() };
        Ok(Self { mpi, rapids, told })
    }

    /// What ranks are told.
    pub(crate) fn told(&self) -> &Told {
        &self.told
    }

    /// Serves the ranks, until this is dropped.
    pub(crate) async fn serve(self) {
        let Self { mut mpi, rapids, told } = self;
        let mut ranks = tokio::task::JoinSet::new();
        let shared = || Arc::new(Shared::new(told.ranks()));
        let (of_mpi, of_rapids, told) = (shared(), shared(), Arc::new(told));
        let strangers = Arc::new(Semaphore::new(STRANGERS));
        // Beyond the places nobody is accepted: a rank waits in the listener's queue, and is not
        // refused.
        let rank_or_stranger = || async {
            let place = Arc::clone(&strangers).acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((rapids.accept().await?.0, place))
        };
        loop {
            tokio::select! {
                // Those that have ended.
                Some(_) = ranks.join_next() => {}
                stream = mpi.connection() => {
                    let (shared, told) = (Arc::clone(&of_mpi), Arc::clone(&told));
                    ranks.spawn(async move { with_mpi(stream, &told, &shared).await });
                }
                accepted = rank_or_stranger() => match accepted {
                    Ok((stream, place)) => {
                        let (shared, told) = (Arc::clone(&of_rapids), Arc::clone(&told));
                        ranks.spawn(async move { with_rapids(stream, &told, &shared, place).await });
                    }
                    Err(_) => tokio::time::sleep(PAUSE).await,
                },
            }
        }
    }
}

async fn with_mpi(mut stream: tokio::net::UnixStream, told: &Told, shared: &Shared) {
    let mut read = Vec::new();
    let greeting = first_line(&mut stream, &mut read);
    let rank = match tokio::time::timeout(PATIENCE, greeting).await {
        Ok(Some(line)) => line.strip_prefix("rank=").and_then(|rank| rank.parse().ok()),
        _ => None,
    };
    let Some(rank) = rank else { return };
    if let Some(program) = told.programs.get(rank as usize) {
        let session = Pmi::new(rank, told.ranks(), *program, &told.job);
        converse(stream, read, session, shared).await;
    }
}

/// The first line of somebody who may be anybody; what follows stays in `read`.
async fn first_line(stream: &mut (impl AsyncRead + Unpin), read: &mut Vec<u8>) -> Option<String> {
    /// Longer than any.
    const LINE: usize = 64;
    loop {
        if let Some(end) = read.iter().position(|byte| *byte == b'\n') {
            let line = read.drain(..=end).take(end).collect();
            return String::from_utf8(line).ok();
        }
        if read.len() > LINE || stream.read_buf(read).await.ok()? == 0 {
            return None;
        }
    }
}

async fn with_rapids(
    mut stream: tokio::net::TcpStream,
    told: &Told,
    shared: &Shared,
    place: tokio::sync::OwnedSemaphorePermit,
) {
    let mut read = Vec::new();
    let greeted = async {
        loop {
            match ranks::greeted(&mut read, told.ranks(), &told.token) {
                Ok(None) if stream.read_buf(&mut read).await.is_ok_and(|more| more > 0) => {}
                Ok(Some(greeted)) => return Some(greeted),
                _ => return None,
            }
        }
    };
    match tokio::time::timeout(PATIENCE, greeted).await.ok().flatten() {
        Some(Greeted::Rank(session)) => {
            drop(place);
            if stream.write_all(b"OK\n").await.is_ok() {
                converse(stream, read, session, shared).await;
            }
        }
        // Whether it learns why does not matter.
        Some(Greeted::Refused(why)) => drop(stream.write_all(why.as_bytes()).await),
        None => {}
    }
}

/// Answers one rank until it leaves, or says what is not of its language.
async fn converse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    mut read: Vec<u8>,
    mut session: impl Session,
    shared: &Shared,
) {
    loop {
        let said = match session.hear(&mut read) {
            Ok(Some(Heard::Nothing)) => continue,
            Ok(Some(Heard::Say(said))) => said,
            Ok(Some(Heard::Ask(ask))) => match shared.answer(ask, &mut stream, &mut read).await {
                Some(answer) => session.answer(answer),
                None => return,
            },
            Ok(None) => match stream.read_buf(&mut read).await {
                Ok(more) if more > 0 => continue,
                _ => return,
            },
            // What it speaks is not this language.
            Err(_) => return,
        };
        if stream.write_all(&said).await.is_err() {
            return;
        }
    }
}

/// The board of one language, and the connections that wait for it.
#[derive(Debug)]
struct Shared(Mutex<Waiting>);

#[derive(Debug)]
struct Waiting {
    board: Board,
    next: Client,
    answers: HashMap<Client, oneshot::Sender<Answer>>,
}

impl Shared {
    fn new(ranks: u32) -> Self {
        let board = Board::new(ranks as usize);
        Self(Mutex::new(Waiting { board, next: 0, answers: HashMap::new() }))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Waiting) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The answer to a question; `None` if the rank has left meanwhile.
    async fn answer(
        &self,
        ask: Ask,
        stream: &mut (impl AsyncRead + Unpin),
        read: &mut Vec<u8>,
    ) -> Option<Answer> {
        let patience = match &ask {
            Ask::Get { wait: Wait::For(patience), .. } => Some(*patience),
            _ => None,
        };
        let (sender, mut answer) = oneshot::channel();
        let client = self.with(|waiting| waiting.ask(ask, sender));
        let expiry = async {
            match patience {
                Some(patience) => tokio::time::sleep(patience).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(expiry);
        let answered = loop {
            tokio::select! {
                biased;
                answer = &mut answer => break answer.ok(),
                () = &mut expiry => break Some(Answer::Missing),
                // It says nothing while it waits; so this is its end.
                more = stream.read_buf(read), if read.len() <= ranks::LONGEST => {
                    if !more.is_ok_and(|more| more > 0) {
                        break None;
                    }
                }
            }
        };
        self.with(|waiting| waiting.forget(client));
        answered
    }
}

impl Waiting {
    fn ask(&mut self, ask: Ask, answer: oneshot::Sender<Answer>) -> Client {
        let client = self.next;
        self.next += 1;
        self.answers.insert(client, answer);
        let due: Due = self.board.ask(client, ask);
        for (client, answer) in due {
            if let Some(waiting) = self.answers.remove(&client) {
                // One that has just left needs none.
                let _ = waiting.send(answer);
            }
        }
        client
    }

    fn forget(&mut self, client: Client) {
        self.answers.remove(&client);
        self.board.forget(client);
    }
}
