//! The guardian's main loop: the supervisor's socket and pidfd, and SIGCHLD.
//!
//! *Invariant:* a child is in `children` until it is reaped, and is reaped only after its group,
//! its control group and its marked orphans have been sent SIGKILL.

mod ending;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::{Pid, getpid, getppid};

use super::channel::{Channel, encoded};
use super::copy::Copy;
use super::outbox::Outbox;
use super::output::{Delivery, Ends, Happening, Output};
use super::{Report, Request, Start, fork, helper};
use crate::os::containment::Cgroup;
use crate::os::descendants::{Family, carries};
use crate::os::exhausted::Explained;
use crate::os::log_file::LogWriter;
use crate::os::pidfd::PidFd;
use crate::os::{process, run_directory, shim};
use cuda_cluster_wire::output::{Source, Stream};
use cuda_cluster_wire::process::{Exit, Key};

/// Descriptor of the supervisor's socket.
pub(super) const CHANNEL_FD: RawFd = 3;

/// Descriptor of the run directory's lock.
pub(super) const LOCK_FD: RawFd = 4;

/// Descriptor of the pipe for the ranks' output, if it has a reader.
pub(super) const OUTPUT_FD: RawFd = 5;

/// The argument that stands for no control group.
pub(super) const NO_CGROUP: &str = "-";

/// The argument that stands for a pipe for the ranks' output.
pub(super) const WITH_OUTPUT: &str = "output";

/// How long to wait for a dead process's last output; a dying descendant may hold the pipe.
const LAST_OUTPUT: Duration = Duration::from_millis(500);

/// Waits for an ended child without reaping it.
const PEEK: WaitPidFlag =
    WaitPidFlag::WEXITED.union(WaitPidFlag::WNOHANG).union(WaitPidFlag::WNOWAIT);

struct Child {
    start: Start,
    pid: Pid,
    exit: Option<Exit>,
    /// Number of streams that have not ended.
    streams: usize,
    /// When to report its exit even if streams are open.
    report_by: Option<Instant>,
}

struct Guard {
    channel: Channel,
    /// The cluster's directory for shared memory files.
    shared_memory: PathBuf,
    cgroup: Option<Cgroup>,
    children: BTreeMap<Key, Child>,
    /// Reports that did not fit into the socket.
    unsent: Outbox,
    /// Control groups of dead processes, to be removed when empty.
    leaving: Vec<Cgroup>,
    logs: BTreeMap<PathBuf, Arc<Mutex<LogWriter>>>,
    /// Where streams report their ends.
    ends: Ends,
    /// Number of streams that have not ended, including those of processes whose exit was reported.
    streams: usize,
    /// The reader of the ranks' output.
    delivery: Option<Arc<Delivery>>,
    /// How long to wait for that reader at the end.
    patience: Patience,
    /// Whether the supervisor requested the end, rather than disappeared.
    dismissed: bool,
}

/// How long to wait for the reader of the ranks' output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// Without limit.
    Full,
    /// As long as it makes progress.
    WhileTaking,
    /// Briefly.
    Short,
}

/// Runs the subcommand: `__guard SUPERVISOR_PID SHARED_MEMORY CGROUP
/// - [output]`.
pub(in crate::os) fn main(arguments: &[String]) -> ExitCode {
    // SAFETY: the supervisor put the socket there for this process alone.
    let channel = Channel::from_descriptor(unsafe { OwnedFd::from_raw_fd(CHANNEL_FD) });
    // The lock is held for the lifetime of this process.
    // SAFETY: as for the socket.
    let lock = unsafe { OwnedFd::from_raw_fd(LOCK_FD) };
    let with_output = arguments.get(3).is_some_and(|word| word == WITH_OUTPUT);
    // SAFETY: as for the socket; the argument says that it is there.
    let output = with_output.then(|| unsafe { OwnedFd::from_raw_fd(OUTPUT_FD) });
    let last = if with_output { OUTPUT_FD } else { LOCK_FD };
    // Close what the supervisor's program left open, such as a pipe whose reader waits for its end.
    // SAFETY: no object in this process owns a descriptor above these yet. Before Linux 5.9 the
    // call fails, and the descriptors stay.
    unsafe { libc::syscall(libc::SYS_close_range, last + 1, libc::c_uint::MAX, 0) };
    match watch(channel, &lock, output, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn watch(
    channel: Channel,
    lock: &OwnedFd,
    output: Option<OwnedFd>,
    arguments: &[String],
) -> io::Result<()> {
    let signals = prepare().inspect_err(|error| {
        // If even that can't be sent, the supervisor sees the end of the socket.
        let report = Report::Unable { reason: error.to_string() };
        let _ = encoded(&report).and_then(|text| channel.send(&text, &[]));
    })?;
    let supervisor = supervisor(arguments)?;
    let cgroup = arguments.get(2).filter(|path| *path != NO_CGROUP);
    // All processes are started in the group. If this process may not enter it, there is no group.
    let cgroup = cgroup.map(|path| Cgroup::at(path.into()));
    let cgroup =
        cgroup.filter(|group| group.child("guardian").is_ok_and(|own| own.enter().is_ok()));
    let shared_memory = arguments.get(1).map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput)?;
    let mut guard = Guard {
        channel,
        shared_memory,
        cgroup,
        children: BTreeMap::new(),
        unsent: Outbox::default(),
        leaving: Vec::new(),
        logs: BTreeMap::new(),
        ends: Ends::new()?,
        streams: 0,
        delivery: output.map(Delivery::begin).transpose()?,
        patience: Patience::Short,
        dismissed: false,
    };
    guard.tell(&Report::Watching);
    // If the channel fails, nothing of the cluster may be left.
    while guard.turn(&supervisor, &signals).unwrap_or(false) {}
    let (dismissed, ended) = (guard.dismissed, std::time::SystemTime::now());
    guard.finish(&supervisor);
    if dismissed { Ok(()) } else { run_directory::write_orphaned(lock, ended) }
}

/// Leaves the terminal's session, adopts orphans, and turns signals into a descriptor.
fn prepare() -> io::Result<SignalFd> {
    // Fails only for a group leader, which this process then is.
    let _ = nix::unistd::setsid();
    nix::sys::prctl::set_child_subreaper(true).map_err(|errno| {
        io::Error::new(
            io::Error::from(errno).kind(),
            format!("adopting orphans (PR_SET_CHILD_SUBREAPER): {}", errno.desc()),
        )
    })?;
    nix::sys::prctl::set_name(c"cluster-guard")?;
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        mask.add(signal);
    }
    mask.thread_block()?;
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

fn supervisor(arguments: &[String]) -> io::Result<PidFd> {
    let pid: Option<i32> = arguments.first().and_then(|text| text.parse().ok());
    let pid = Pid::from_raw(pid.ok_or(io::ErrorKind::InvalidInput)?);
    let supervisor = PidFd::open(pid)?;
    // If the supervisor had died already, this process would have another parent.
    if getppid() == pid { Ok(supervisor) } else { Err(io::ErrorKind::NotFound.into()) }
}

impl Guard {
    /// Waits for an event and handles it; returns whether to continue.
    fn turn(&mut self, supervisor: &PidFd, signals: &SignalFd) -> io::Result<bool> {
        let waiting = if self.unsent.is_empty() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        };
        let mut watched = [
            PollFd::new(self.channel.as_fd(), waiting),
            PollFd::new(supervisor.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.ends.readable().as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut watched, self.patience()) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready = |at: usize| watched[at].any().unwrap_or(false);
        let (requested, orphaned, signalled, woken) = (ready(0), ready(1), ready(2), ready(3));
        if orphaned {
            return Ok(false);
        }
        // Slurm and service managers send SIGTERM to every process of a cluster. The supervisor has
        // received it, too, and ends the workers in order.
        while signalled && let Ok(Some(_)) = signals.read_signal() {}
        if woken {
            self.ends.rearm();
            self.note_ends();
        }
        self.reap();
        self.report_exits();
        self.leaving.retain(|group| !group.remove());
        if requested && !self.obey()? {
            return Ok(false);
        }
        // Without room, or a supervisor, the reports stay.
        let _ = self.unsent.flush(&self.channel);
        Ok(true)
    }

    /// How long nothing needs to be done; without limit when idle.
    fn patience(&self) -> PollTimeout {
        let soonest = self.children.values().filter_map(|child| child.report_by).min();
        let exit = soonest.map(|by| by.saturating_duration_since(Instant::now()));
        let group = (!self.leaving.is_empty()).then_some(Duration::from_millis(10));
        match exit.into_iter().chain(group).min() {
            Some(wait) => PollTimeout::from(u16::try_from(wait.as_millis() + 1).unwrap_or(1000)),
            None => PollTimeout::NONE,
        }
    }

    /// Handles a request of the supervisor; returns whether to continue.
    fn obey(&mut self) -> io::Result<bool> {
        loop {
            match self.channel.receive::<Request>() {
                Ok(Some((Request::Start(start), descriptors))) => self.start(start, descriptors),
                Ok(Some((Request::Signal { key, signal }, _))) => self.signal(key, signal),
                Ok(Some((Request::Kill { key }, _))) => self.kill(key),
                Ok(Some((Request::Ask, _))) => self.tell(&Report::Alive),
                Ok(Some((Request::Deliver { hurry }, _))) => {
                    self.dismissed = true;
                    self.patience = if hurry { Patience::WhileTaking } else { Patience::Full };
                    return Ok(false);
                }
                Ok(Some((Request::Finish, _))) => {
                    self.dismissed = true;
                    return Ok(false);
                }
                Ok(None) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn start(&mut self, start: Start, descriptors: Vec<OwnedFd>) {
        let key = start.key;
        match self.spawn(&start, &descriptors) {
            Ok((pid, streams)) => {
                self.tell(&Report::Started { key, pid: pid.as_raw().cast_unsigned() });
                let child = Child { start, pid, exit: None, streams, report_by: None };
                self.children.insert(key, child);
            }
            Err(error) => {
                self.tell(&Report::NotStarted { key, reason: Explained(&error).to_string() });
            }
        }
    }

    /// Starts a process; returns its id and its number of output streams.
    fn spawn(&mut self, start: &Start, descriptors: &[OwnedFd]) -> io::Result<(Pid, usize)> {
        let [instructions, status, input @ ..] = descriptors else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "two descriptors belong here"));
        };
        let separate = start.separate_streams;
        // If the start fails, the writing ends are dropped, and the threads end.
        let output = self.stream(start, Stream::Output)?;
        let error = separate.then(|| self.stream(start, Stream::Error)).transpose()?;
        let streams = 1 + usize::from(separate);
        if let Some(socket) = &start.fork_server {
            let streams_of = [Some(&output), error.as_ref()];
            let outputs = streams_of.into_iter().flatten().map(AsFd::as_fd);
            let handed: Vec<_> =
                [instructions.as_fd(), status.as_fd()].into_iter().chain(outputs).collect();
            match fork::ask(socket, &handed) {
                Ok(pid) => return Ok((pid, streams)),
                Err(error) => fork::excuse(status, &error),
            }
        }
        let mut descriptors = vec![
            (output.as_raw_fd(), 1),
            (error.as_ref().unwrap_or(&output).as_raw_fd(), 2),
            (instructions.as_raw_fd(), shim::INSTRUCTIONS_FD),
            (status.as_raw_fd(), shim::STATUS_FD),
        ];
        descriptors.extend(input.first().map(|input| (input.as_raw_fd(), 0)));
        let arguments = [shim::SUBCOMMAND.to_owned(), getpid().to_string()];
        let pid = helper::spawn(&arguments, &descriptors)?;
        Ok((pid, streams))
    }

    /// Creates an output stream for a process, and starts its thread.
    fn stream(&mut self, start: &Start, stream: Stream) -> io::Result<io::PipeWriter> {
        let (pipe, writer) = io::pipe()?;
        let log = self.logs.entry(start.log.clone()).or_insert_with(|| {
            let (limit, keep) = (start.log_rotate_bytes, start.log_keep);
            Arc::new(Mutex::new(LogWriter::new(start.log.clone(), limit, keep)))
        });
        let source = start.deliver_as.map(|rank| Source { rank, stream });
        let output = Output {
            key: start.key,
            name: start.name.clone(),
            pipe,
            log: Arc::clone(log),
            shares_log: start.separate_streams,
            copy: start.copy.as_deref().map(|stem| Copy::of(stem, stream)),
            delivery: self.delivery.clone().zip(source),
        };
        output.follow(&self.ends)?;
        self.streams += 1;
        Ok(writer)
    }

    fn signal(&self, key: Key, signal: i32) {
        let Some(child) = self.children.get(&key).filter(|child| child.exit.is_none()) else {
            return;
        };
        let Ok(signal) = Signal::try_from(signal) else { return };
        // The group exists until its leader is reaped.
        let _ = killpg(child.pid, signal);
        if signal != Signal::SIGKILL {
            // A stopped process would not receive the signal.
            let _ = killpg(child.pid, Signal::SIGCONT);
        }
    }

    fn kill(&self, key: Key) {
        if let Some(child) = self.children.get(&key).filter(|child| child.exit.is_none()) {
            self.kill_all_of(child);
        }
    }

    /// Sends SIGKILL to a child that has not been reaped, its group, its control group, and
    /// descendants that have left them.
    fn kill_all_of(&self, child: &Child) {
        // Fails only if nothing is left to kill.
        let _ = killpg(child.pid, Signal::SIGKILL);
        match &child.start.cgroup {
            Some(path) => Cgroup::at(path.clone()).kill(),
            None => self.kill_orphans_of(child),
        }
    }

    /// Without a control group: kills the process's descendants, and adopted processes (with their
    /// descendants) that carry its name in their environment.
    fn kill_orphans_of(&self, child: &Child) {
        let family = Family::look();
        let known: Vec<Pid> = self.children.values().map(|child| child.pid).collect();
        let adopted = family.children(getpid()).into_iter().filter(|pid| !known.contains(pid));
        let marked = adopted.filter(|pid| carries(*pid, &child.start.mark()));
        for root in marked.chain([child.pid]) {
            for pid in family.descendants(root).into_iter().chain([root]) {
                // This process reaps its own children only later, and other processes existed an
                // instant ago: the kernel reuses a process id only after it has used all others.
                let _ = kill(pid, Signal::SIGKILL);
            }
        }
    }

    /// Records ended children, kills what they have left behind, and reaps them and all orphans.
    fn reap(&mut self) {
        while let Ok(status) = waitid(Id::All, PEEK) {
            let Some(pid) = status.pid() else { return };
            let ended = self.children.iter().find(|(_, child)| child.pid == pid);
            if let Some((_, child)) = ended {
                self.kill_all_of(child);
            }
            let key = ended.map(|(key, _)| *key);
            let reaped = waitpid(pid, Some(WaitPidFlag::WNOHANG)).ok().and_then(process::exit);
            if let (Some(key), Some(exit)) = (key, reaped)
                && let Some(child) = self.children.get_mut(&key)
            {
                child.exit = Some(exit);
                child.report_by = Some(Instant::now() + LAST_OUTPUT);
                if let Some(delivery) = &self.delivery {
                    delivery.let_through(key);
                }
            }
        }
    }

    fn note_ends(&mut self) {
        while let Some((key, happening)) = self.ends.next() {
            self.note_end(key, happening);
        }
    }

    fn note_end(&mut self, key: Key, happening: Happening) {
        if let Happening::NotCopied { path, reason } = happening {
            return self.tell(&Report::NotCopied { key, path, reason });
        }
        self.streams = self.streams.saturating_sub(1);
        if let Some(child) = self.children.get_mut(&key) {
            child.streams = child.streams.saturating_sub(1);
        }
    }

    /// Reports exits whose output is complete, or was waited for long enough.
    fn report_exits(&mut self) {
        let now = Instant::now();
        let complete = |child: &Child| {
            let waited = child.report_by.is_some_and(|by| by <= now);
            child.exit.is_some() && (child.streams == 0 || waited)
        };
        let keys: Vec<Key> = self
            .children
            .iter()
            .filter(|(_, child)| complete(child))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            let Some(child) = self.children.remove(&key) else { continue };
            if let Some(path) = child.start.cgroup {
                self.leaving.push(Cgroup::at(path));
            }
            if let Some(exit) = child.exit {
                self.tell(&Report::Exited { key, exit });
            }
        }
    }

    /// Reports to the supervisor. A lost one is detected elsewhere.
    fn tell(&self, report: &Report) {
        let _ = self.unsent.send(&self.channel, report, Vec::new());
    }
}
