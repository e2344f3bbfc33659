//! The shim: binds its own process, then executes the program.
//!
//! A hidden subcommand (`__shim GUARDIAN_PID`), single-threaded, so that its settings hold for
//! every thread and page of the program from its first instruction. Starts no other processes.
//!
//! *Invariant:* the program runs only while the guardian lives, and inherits no descriptors except
//! standard input (`/dev/null`, or what it was given), output and error (the log), the status pipe
//! if it uses it, and the connections that its instructions name.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::binding::{self, InForce};
use super::containment::Cgroup;
use super::{argument, process};
use cuda_cluster_model::plan::{Connection, LimitPlan, Program};
use cuda_cluster_wire::status::{self, Status};

/// The hidden subcommand.
pub(super) const SUBCOMMAND: &str = "__shim";

/// Descriptor of the instructions, a file with JSON.
pub(super) const INSTRUCTIONS_FD: RawFd = 3;

/// Descriptor of the status pipe's writing end.
pub(super) const STATUS_FD: RawFd = 4;

/// Exit status of a shim that failed.
const REFUSED: u8 = 125;

/// Instructions for the shim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instructions {
    /// The program to execute.
    pub program: Program,
    /// Limits, by `RLIMIT_…` name in lower case without the prefix (`core`, `nofile`, `memlock`);
    /// `None` for no limit.
    pub limits: BTreeMap<String, LimitPlan>,
    /// The control group to enter.
    pub cgroup: Option<PathBuf>,
    /// Whether the program inherits the status pipe.
    pub keep_status: bool,
    /// Whether to fail if a part of the binding could not be applied.
    pub strict: bool,
    /// Whether the program is the one that this shim runs, whatever has become of its file.
    pub own: bool,
}

/// Why the program was not executed.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the guardian is gone")]
    Orphaned,
    #[error("the instructions cannot be read: {0}")]
    Instructions(String),
    #[error("under 'strict': {}", .0.join("; "))]
    Strict(Vec<String>),
    #[error("cannot connect to {}, as {variable} is to say: {source}", socket.display())]
    Connection { variable: String, socket: PathBuf, source: std::io::Error },
    #[error("cannot execute {program}: {}", errno.desc())]
    Execute { program: String, errno: Errno },
}

impl Refusal {
    /// The codes that shells use: 127 if the program does not exist, 126 if it can't be executed.
    fn code(&self) -> u8 {
        match self {
            Self::Execute { errno: Errno::ENOENT, .. } => 127,
            Self::Execute { .. } => 126,
            _ => REFUSED,
        }
    }
}

/// Runs the subcommand; returns only if the program was not executed.
pub(super) fn main(arguments: &[String]) -> ExitCode {
    // SAFETY: the guardian put the status pipe there for this process alone, and nothing else in
    // this process has taken the descriptor.
    let mut pipe = File::from(unsafe { OwnedFd::from_raw_fd(STATUS_FD) });
    let refusal = match become_program(arguments, &mut pipe) {
        Ok(never) => match never {},
        Err(refusal) => refusal,
    };
    let failed = status::encode(&Status::Failed { reason: refusal.to_string() });
    // If the supervisor is gone, the reason is of no use.
    let _ = pipe.write_all(failed.as_bytes());
    ExitCode::from(refusal.code())
}

fn become_program(
    arguments: &[String],
    pipe: &mut File,
) -> Result<std::convert::Infallible, Refusal> {
    die_with_guardian(arguments)?;
    let instructions = read_instructions()?;
    let mut notes = Vec::new();
    if let Some(path) = &instructions.cgroup
        && let Err(error) = Cgroup::at(path.clone()).enter()
    {
        notes.push(format!("the control group {} refused: {error}", path.display()));
    }
    set_limits(&instructions.limits, &mut notes);
    let InForce { cpus, mems, notes: unbound } = binding::apply(&instructions.program.binding);
    notes.extend(unbound);
    if instructions.strict && !notes.is_empty() {
        return Err(Refusal::Strict(notes));
    }
    set_environment(&instructions)?;
    close_the_rest(pipe, instructions.keep_status);
    connect(&instructions.program)?;
    let bound = status::encode(&Status::Bound { cpus, mems, notes });
    // If the supervisor is gone, this process will be killed; ignore the error.
    let _ = pipe.write_all(bound.as_bytes());
    execute(&instructions.program.argv, instructions.own)
}

/// Requests SIGKILL for when the guardian's thread ends, and checks that it has not ended yet.
fn die_with_guardian(arguments: &[String]) -> Result<(), Refusal> {
    let guardian: Option<i32> = arguments.first().and_then(|text| text.parse().ok());
    let signal = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    let parent = nix::unistd::getppid().as_raw();
    match (signal, guardian) {
        (Ok(()), Some(guardian)) if guardian == parent => Ok(()),
        _ => Err(Refusal::Orphaned),
    }
}

fn read_instructions() -> Result<Instructions, Refusal> {
    // SAFETY: as for the status pipe.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(INSTRUCTIONS_FD) });
    let mut text = String::new();
    // A fork server that answered too late may have read the file, and the offset is shared.
    file.rewind()
        .and_then(|()| file.read_to_string(&mut text))
        .map_err(|error| Refusal::Instructions(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| Refusal::Instructions(error.to_string()))
}

fn set_limits(limits: &BTreeMap<String, LimitPlan>, notes: &mut Vec<String>) {
    for (name, wanted) in limits {
        let Some(resource) = resource(name) else {
            notes.push(format!("limit {name} is not known here"));
            continue;
        };
        let number = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
        let soft = number(wanted.soft());
        let applied = match wanted {
            // Raise the hard limit if allowed; otherwise keep it if it is high enough.
            LimitPlan::One(_) => {
                getrlimit(resource).and_then(|(_, hard)| setrlimit(resource, soft, hard.max(soft)))
            }
            LimitPlan::Both { hard, .. } => setrlimit(resource, soft, number(*hard)),
        };
        if let Err(errno) = applied {
            let shown = |limit: Option<u64>| {
                limit.map_or("unlimited".to_owned(), |limit| limit.to_string())
            };
            let wanted = match wanted {
                LimitPlan::One(soft) => shown(*soft),
                LimitPlan::Both { soft, hard } => format!("{}:{}", shown(*soft), shown(*hard)),
            };
            notes.push(format!("limit {name} could not be set to {wanted}: {}", errno.desc()));
        }
    }
}

fn resource(name: &str) -> Option<Resource> {
    Some(match name {
        "as" => Resource::RLIMIT_AS,
        "core" => Resource::RLIMIT_CORE,
        "memlock" => Resource::RLIMIT_MEMLOCK,
        "nofile" => Resource::RLIMIT_NOFILE,
        "nproc" => Resource::RLIMIT_NPROC,
        "stack" => Resource::RLIMIT_STACK,
        _ => return None,
    })
}

fn set_environment(instructions: &Instructions) -> Result<(), Refusal> {
    let speakable = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
    let env = &instructions.program.env;
    if let Some(name) = env.keys().find(|name| !speakable(name)) {
        return Err(Refusal::Instructions(format!("{name:?} is no variable's name")));
    }
    if let Some((name, _)) = env.iter().find(|(_, value)| value.contains('\0')) {
        return Err(Refusal::Instructions(format!("the value of {name} has a zero byte")));
    }
    // SAFETY: this process has one thread.
    unsafe {
        for name in instructions.program.without.iter().filter(|name| speakable(name)) {
            std::env::remove_var(name);
        }
        for (name, value) in env {
            std::env::set_var(name, value);
        }
        if instructions.keep_status {
            std::env::set_var(status::FD_VARIABLE, STATUS_FD.to_string());
        } else {
            std::env::remove_var(status::FD_VARIABLE);
        }
    }
    Ok(())
}

/// Marks all descriptors beyond standard error to be closed by `exec`, except the status pipe if
/// the program is to inherit it.
fn close_the_rest(pipe: &File, keep_status: bool) {
    let close_on_exec = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    // SAFETY: the call changes flags of descriptors only; none is closed while this process runs.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, close_on_exec) };
    if marked != 0 {
        // Before Linux 5.11. The guardian passed these two descriptors and no others.
        let _ = fcntl(pipe, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }
    if keep_status {
        // Cannot fail on an open descriptor.
        let _ = fcntl(pipe, FcntlArg::F_SETFD(FdFlag::empty()));
    }
    debug_assert_eq!(pipe.as_raw_fd(), STATUS_FD);
}

/// Connects what the program is to find open; says which descriptors these are.
fn connect(program: &Program) -> Result<(), Refusal> {
    for (variable, Connection { socket, greeting }) in &program.connections {
        let refused = |source| Refusal::Connection {
            variable: variable.clone(),
            socket: socket.clone(),
            source,
        };
        let mut stream = UnixStream::connect(socket).map_err(refused)?;
        stream.write_all(greeting.as_bytes()).map_err(refused)?;
        fcntl(&stream, FcntlArg::F_SETFD(FdFlag::empty()))
            .map_err(|error| refused(error.into()))?;
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(variable, stream.into_raw_fd().to_string()) };
    }
    Ok(())
}

fn execute(argv: &[String], own: bool) -> Result<std::convert::Infallible, Refusal> {
    let argv: Vec<OsString> = argv.iter().map(|text| argument::decoded(text)).collect();
    let program = argv.first().map(|program| program.to_string_lossy().into_owned());
    let program = program.unwrap_or_default();
    let refusal = |errno| Refusal::Execute { program: program.clone(), errno };
    let arguments: Result<Vec<CString>, _> =
        argv.iter().map(|argument| CString::new(argument.as_bytes())).collect();
    let arguments = arguments.map_err(|_| refusal(Errno::EINVAL))?;
    let first = arguments.first().ok_or_else(|| refusal(Errno::ENOENT))?;
    let file = match own {
        true => CString::new(process::own_program().into_os_string().into_vec()),
        false => Ok(first.clone()),
    };
    let file = file.map_err(|_| refusal(Errno::EINVAL))?;
    // Otherwise the program would inherit that they are ignored.
    super::default_ignored_signals();
    nix::unistd::execvp(&file, &arguments).map_err(refusal)
}
