//! Has the bytes between a cluster's processes counted from outside, from its start to its end.
//!
//! Judges nothing itself.
//!
//! *Invariant:* the supervisor reads no counter and no log: another process does, of which there
//! is one, and which ends with it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::watch;

use super::{Prepared, aside};
use crate::report::entries;
use cuda_cluster_machine::os::run_directory::{Paths, write_private};
use cuda_cluster_machine::probe::{GpuMeter, Options, nics, traffic};
use cuda_cluster_model::plan::Plan;
use cuda_cluster_model::topology::{Device, Topology};
use cuda_cluster_supervise::ClusterState;
use cuda_cluster_why::audit::{Audit, Expected, Link, Member, Moved, Seen, audit};
use cuda_cluster_why::evidence::Rank;
use cuda_cluster_why::look::flows::Flows;
use cuda_cluster_why::wires::{self, Wires};

/// The hidden subcommand that counts.
pub(crate) const SUBCOMMAND: &str = "__audit";

/// Time between two audits that others may read.
const EVERY: Duration = Duration::from_secs(5);

/// How long an answer may take, and the last one.
const ANSWER: Duration = Duration::from_secs(10);

/// The least and the most time between two readings of the connections; of a young job they are
/// read more often, because it opens them then.
const READINGS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// The most bytes that are read of a log.
const LONGEST_LOG: u64 = 16 << 20;

/// The variables in which NCCL is asked for its lines, and where they go.
const NCCL_LEVEL: &str = "NCCL_DEBUG";
const NCCL_FILE: &str = "NCCL_DEBUG_FILE";

/// What the plan of a cluster says of its wires.
fn expected(plan: &Plan, machine: Option<&Topology>) -> Expected {
    let members = plan.workers.iter().map(|worker| Member {
        name: worker.name.clone(),
        gpu: worker.gpu.as_ref().map(|gpu| gpu.index.0),
        pci: worker.gpu.as_ref().and_then(|gpu| gpu.pci),
    });
    let gpu = |at: usize| Some(Device::Gpu(plan.workers.get(at)?.gpu.as_ref()?.index));
    let link = |between: [usize; 2]| {
        let kind = machine?.links.between(gpu(between[0])?, gpu(between[1])?)?;
        Some(Link { between, kind })
    };
    let pairs = (0..plan.workers.len()).flat_map(|a| (0..a).map(move |b| [b, a]));
    Expected {
        members: members.collect(),
        links: pairs.filter_map(link).collect(),
        simulated: plan.machine.simulated,
    }
}

/// Has a rank's NCCL write which wires it uses into a file of the run directory, unless the user
/// has asked for its lines.
pub(crate) fn ask_nccl(paths: &Paths, env: &mut BTreeMap<String, String>) {
    let is_set = |name: &str| env.contains_key(name) || std::env::var_os(name).is_some();
    if is_set(NCCL_LEVEL) || is_set(NCCL_FILE) {
        return;
    }
    let file = paths.audit_logs().join("nccl.%h.%p");
    env.insert(NCCL_LEVEL.to_owned(), "INFO".to_owned());
    env.insert(NCCL_FILE.to_owned(), file.display().to_string());
}

/// A question, one line of JSON; the answer is an [`Audit`] in a line.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    expected: Expected,
    ranks: Vec<Rank>,
    /// The folder with NCCL's files.
    folder: PathBuf,
    /// Logs of ranks that may have NCCL's lines.
    logs: Vec<PathBuf>,
}

/// Counts for a supervisor: reads orders from standard input, writes audits to standard output.
pub(crate) fn main() -> ExitCode {
    let counted = aside::end_with_the_starter() && count().is_ok();
    if counted { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn count() -> io::Result<()> {
    let mut counting = Counting::begin();
    let (mut input, mut output) = (io::stdin(), io::stdout());
    let mut text = Vec::new();
    loop {
        let due = counting.wait();
        let ready = |events: Option<PollFlags>| events.is_some_and(|events| !events.is_empty());
        let has_input = {
            let mut waits = vec![PollFd::new(input.as_fd(), PollFlags::POLLIN)];
            let closed = counting.flows.descriptor();
            waits.extend(closed.map(|closed| PollFd::new(closed, PollFlags::POLLIN)));
            poll(&mut waits, due)?;
            ready(waits[0].revents())
        };
        counting.flows.hear();
        if counting.is_due() {
            counting.read();
        }
        if !has_input {
            continue;
        }
        let mut bytes = [0; 1 << 16];
        let length = input.read(&mut bytes)?;
        if length == 0 {
            return Ok(());
        }
        text.extend(&bytes[..length]);
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let order: Order = serde_json::from_slice(&line)?;
            let answer = serde_json::to_string(&counting.answer(order))?;
            writeln!(output, "{answer}")?;
            output.flush()?;
        }
    }
}

/// What has been counted so far.
struct Counting {
    began: Instant,
    read_at: Instant,
    flows: Flows,
    ranks: Vec<Rank>,
    gpus: Option<GpuMeter>,
    sysfs: PathBuf,
    /// What devices had moved before.
    before: Option<Vec<Moved>>,
    shared_memory: Option<[u64; 2]>,
    said: Said,
}

impl Counting {
    fn begin() -> Self {
        let options = Options::from_environment().unwrap_or_default();
        let now = Instant::now();
        Self {
            began: now,
            read_at: now,
            flows: Flows::begin(),
            ranks: Vec::new(),
            gpus: GpuMeter::open(&options),
            sysfs: options.sysfs,
            before: None,
            shared_memory: None,
            said: Said::default(),
        }
    }

    fn interval(&self) -> Duration {
        (self.began.elapsed() / 10).clamp(READINGS[0], READINGS[1])
    }

    fn is_due(&self) -> bool {
        self.read_at.elapsed() >= self.interval()
    }

    fn wait(&self) -> PollTimeout {
        let left = self.interval().saturating_sub(self.read_at.elapsed());
        // Rounded up, so that it does not wake too early.
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::ZERO)
    }

    fn read(&mut self) {
        self.flows.read(&self.ranks);
        self.read_at = Instant::now();
        let room = self.ranks.iter().find_map(|rank| room(rank.pid?));
        self.shared_memory =
            [self.shared_memory, room].into_iter().flatten().min_by_key(|[least, _]| *least);
    }

    fn answer(&mut self, order: Order) -> Audit {
        self.ranks = order.ranks;
        self.read();
        let now = self.moved(&order.expected);
        let devices = difference(self.before.get_or_insert_with(|| now.clone()), now);
        let logs = entries(&order.folder).into_iter().chain(order.logs);
        let seen = Seen {
            ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            flows: self.flows.totals(),
            wires: self.said.read(logs.collect()),
            devices,
            shared_memory: self.shared_memory,
            unseen: self.flows.unseen().map(str::to_owned).collect(),
        };
        audit(&order.expected, seen)
    }

    /// What the members' GPUs and the NICs have moved since their drivers began to count.
    fn moved(&mut self, expected: &Expected) -> Vec<Moved> {
        let gauges = self.gpus.as_mut().map(GpuMeter::read).unwrap_or_default();
        let mut found = Vec::new();
        let mut add = |device: &str, wire: &str, bytes: [Option<u64>; 2]| {
            if let [Some(sent_bytes), Some(received_bytes)] = bytes {
                let (device, wire) = (device.to_owned(), wire.to_owned());
                found.push(Moved { device, wire, sent_bytes, received_bytes });
            }
        };
        for member in &expected.members {
            let Some(gauges) = member.gpu.and_then(|gpu| gauges.get(&gpu)) else { continue };
            add(&member.name, "NVLink", gauges.nvlink_bytes);
            add(&member.name, "PCIe", gauges.pcie_bytes);
        }
        if !expected.simulated {
            for nic in nics(&self.sysfs) {
                if let Some(moved) = traffic(&self.sysfs, &nic) {
                    let bytes = [Some(moved.sent_bytes), Some(moved.received_bytes)];
                    add(&nic.name, "network", bytes);
                }
            }
        }
        found
    }
}

/// What has been moved since; a device that has moved nothing, or whose counters have begun anew,
/// is left out.
fn difference(before: &[Moved], now: Vec<Moved>) -> Vec<Moved> {
    let since = |now: Moved| {
        let same = |it: &&Moved| it.device == now.device && it.wire == now.wire;
        let before = before.iter().find(same)?;
        let sent_bytes = now.sent_bytes.checked_sub(before.sent_bytes)?;
        let received_bytes = now.received_bytes.checked_sub(before.received_bytes)?;
        let moved = sent_bytes > 0 || received_bytes > 0;
        moved.then_some(Moved { sent_bytes, received_bytes, ..now })
    };
    now.into_iter().filter_map(since).collect()
}

/// The room that a process has in its `/dev/shm`, and its size, in bytes.
fn room(pid: u32) -> Option<[u64; 2]> {
    let file_system = statvfs(Path::new(&format!("/proc/{pid}/root/dev/shm"))).ok()?;
    let block = file_system.fragment_size();
    Some([file_system.blocks_available() * block, file_system.blocks() * block])
}

/// What NCCL and UCX have said, which is only read again when there is more of it.
#[derive(Default)]
struct Said {
    logs: Vec<(PathBuf, u64)>,
    wires: Wires,
}

impl Said {
    fn read(&mut self, logs: Vec<PathBuf>) -> Wires {
        let length = |path: &Path| fs::metadata(path).map_or(0, |log| log.len());
        let logs: Vec<(PathBuf, u64)> =
            logs.into_iter().map(|path| (path.clone(), length(&path))).collect();
        if logs != self.logs {
            let lines: String = logs.iter().map(|(path, _)| nccl_lines(path)).collect();
            self.wires = wires::read(&lines);
            self.logs = logs;
        }
        self.wires.clone()
    }
}

/// The lines of a log that may be NCCL's or UCX's.
fn nccl_lines(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|log| log.take(LONGEST_LOG).read_to_end(&mut bytes));
    if read.is_err() {
        return String::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines = text.lines().filter(|line| line.contains("NCCL") || line.contains("UCX"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Watches a cluster until it has ended.
pub(crate) struct Auditor {
    program: PathBuf,
    paths: Paths,
    expected: Expected,
    state: watch::Receiver<ClusterState>,
}

impl Auditor {
    pub(crate) fn of(
        prepared: &Prepared,
        program: &Path,
        paths: &Paths,
        state: watch::Receiver<ClusterState>,
    ) -> Self {
        let expected = expected(&prepared.plan, prepared.machine.as_ref());
        Self { program: program.to_owned(), paths: paths.clone(), expected, state }
    }

    /// Counts until the cluster has ended; an error says why that was not seen.
    pub(crate) async fn run(mut self) -> Result<Audit, String> {
        let mut counter = Counter::start(&self.program).map_err(|error| error.to_string())?;
        loop {
            let (order, has_ended) = self.order();
            let answer = tokio::time::timeout(ANSWER, counter.ask(&order)).await;
            let audit = answer.map_err(|_| "it does not answer".to_owned())?;
            let audit = audit.map_err(|error| error.to_string())?;
            // The run directory is gone after an orderly end.
            if let Ok(text) = serde_json::to_vec(&audit) {
                let _ = write_private(&self.paths.audit(), &text);
            }
            if has_ended {
                return Ok(audit);
            }
            let pids = pids(&self.state.borrow_and_update());
            let changed =
                self.state.wait_for(|now| now.ended_at.is_some() || self::pids(now) != pids);
            if let Ok(Err(_)) = tokio::time::timeout(EVERY, changed).await {
                return Err("the supervisor was gone before the cluster's end".to_owned());
            }
        }
    }

    /// What is to be counted, and whether that is the last time.
    fn order(&self) -> (Order, bool) {
        let state = self.state.borrow();
        let processes = || state.scheduler.iter().chain(&state.workers);
        let rank = |process: &cuda_cluster_supervise::ProcessState| Rank {
            name: process.name.clone(),
            pid: process.pid,
            ..Rank::default()
        };
        let has_ended = state.ended_at.is_some();
        let logs = processes().filter(|_| has_ended).map(|process| process.log.clone());
        let order = Order {
            expected: self.expected.clone(),
            ranks: processes().map(rank).collect(),
            folder: self.paths.audit_logs(),
            logs: logs.collect(),
        };
        (order, has_ended)
    }
}

fn pids(state: &ClusterState) -> Vec<Option<u32>> {
    state.scheduler.iter().chain(&state.workers).map(|process| process.pid).collect()
}

/// The process that counts.
struct Counter {
    /// Killed when this is dropped.
    _child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Counter {
    fn start(program: &Path) -> io::Result<Self> {
        let mut child = aside::command(program, SUBCOMMAND).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Self { _child: child, input, output: BufReader::new(output) })
    }

    async fn ask(&mut self, order: &Order) -> io::Result<Audit> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.input.write_all(&line).await?;
        let mut answer = String::new();
        if self.output.read_line(&mut answer).await? == 0 {
            return Err(io::Error::other("it has ended"));
        }
        Ok(serde_json::from_str(&answer)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(device: &str, sent_bytes: u64) -> Moved {
        let (device, wire) = (device.to_owned(), "NVLink".to_owned());
        Moved { device, wire, sent_bytes, received_bytes: 0 }
    }

    #[test]
    fn only_what_was_moved_meanwhile_counts() {
        let before = [moved("gpu0", 10), moved("gpu1", 10), moved("gpu2", 10)];
        let now = vec![moved("gpu0", 15), moved("gpu1", 10), moved("gpu2", 3), moved("gpu3", 9)];
        assert_eq!(difference(&before, now), [moved("gpu0", 5)]);
    }

    #[test]
    fn what_the_user_has_asked_nccl_for_stays() {
        let paths = Paths::at(Path::new("/run/x"));
        let mut env = BTreeMap::new();
        ask_nccl(&paths, &mut env);
        assert_eq!(env["NCCL_DEBUG_FILE"], "/run/x/audit/nccl.%h.%p");
        let mut own = BTreeMap::from([("NCCL_DEBUG".to_owned(), "WARN".to_owned())]);
        ask_nccl(&paths, &mut own);
        assert_eq!(own.len(), 1);
    }
}
