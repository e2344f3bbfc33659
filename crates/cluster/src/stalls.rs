//! Has a cluster's processes looked at from outside, and tells its supervisor if they can't go on.
//!
//! Judges nothing itself.
//!
//! *Invariant:* the supervisor reads no other process's memory and waits for no look: each is a
//! process of its own, which the kernel may hold for long, and of which there is one at a time.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::watch;

use crate::aside;
use crate::queued::Engine;
use cuda_cluster_machine::os::run_directory::{Paths, write_private};
use cuda_cluster_model::plan::EngineKind;
use cuda_cluster_supervise::{ClusterState, ProcessGpu, ProcessState, Stall, Stopper};
use cuda_cluster_why::evidence::Rank;
use cuda_cluster_why::look::{Limits, look};
use cuda_cluster_why::patience::{Change, Patience};
use cuda_cluster_why::{Evidence, Verdict, judge};

/// The hidden subcommand that looks once.
pub(crate) const SUBCOMMAND: &str = "__look";

/// How long a look may take: it gives up itself long before.
const LONGEST_LOOK: Duration = Duration::from_secs(30);

/// How long one that was killed is waited for, unless the kernel holds it.
const END: Duration = Duration::from_secs(1);

/// The least and the most time between two looks. Eight ranks cost a tenth of a second of a CPU.
const BETWEEN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The longest answer: 1,000 processes of 100 threads have less.
const LONGEST_ANSWER: u64 = 256 << 20;

/// What is to be looked at.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    ranks: Vec<Rank>,
    serves: bool,
    /// Who is asked about its tasks.
    engine: Option<Engine>,
}

/// What was seen, and what follows from it.
#[derive(Debug, Serialize, Deserialize)]
struct Seen {
    verdict: Verdict,
    evidence: Evidence,
}

/// Looks at the processes of a cluster that are in this state.
pub fn look_at(state: &ClusterState) -> Evidence {
    Order::of(state).look()
}

impl Order {
    fn of(state: &ClusterState) -> Self {
        let processes = state.scheduler.iter().chain(&state.workers);
        let rank = |process: &ProcessState| Rank {
            // What the driver says of a simulated one's address is another's.
            gpu: process.gpu.as_ref().filter(|_| !state.simulated).and_then(pci),
            ..rank(process)
        };
        // The processes of other engines wait for requests while nothing is to be done.
        let serves = state.engine != EngineKind::Command;
        Self { ranks: processes.map(rank).collect(), serves, engine: Engine::of(state) }
    }

    fn look(self) -> Evidence {
        let mut evidence = look(self.ranks, self.serves, Limits::default());
        if let Some(engine) = self.engine {
            engine.ask(&mut evidence);
        }
        evidence
    }
}

fn pci(gpu: &ProcessGpu) -> Option<String> {
    gpu.pci.map(|pci| pci.to_string())
}

fn rank(process: &ProcessState) -> Rank {
    let written = fs::metadata(&process.log).and_then(|log| log.modified()).ok();
    let silent = written.and_then(|at| SystemTime::now().duration_since(at).ok());
    let ended = process.last_exit.as_ref().filter(|_| process.pid.is_none());
    Rank {
        name: process.name.clone(),
        pid: process.pid,
        number: process.rank,
        gpu: None,
        last_pid: ended.and_then(|last| last.pid),
        ended: ended.map(|last| last.reason.clone()),
        silent_for_ms: silent.and_then(|silent| u64::try_from(silent.as_millis()).ok()),
    }
}

/// Looks once, in a process of its own: reads the order from standard input, writes what was seen
/// to standard output.
pub(crate) fn main() -> ExitCode {
    let bound = aside::end_with_the_starter();
    let mut text = String::new();
    let read = io::stdin().take(LONGEST_ANSWER).read_to_string(&mut text);
    let order: Option<Order> = serde_json::from_str(&text).ok();
    let (true, Ok(_), Some(order)) = (bound, read, order) else { return ExitCode::FAILURE };
    let evidence = order.look();
    aside::answer(&Seen { verdict: judge(&evidence), evidence })
}

/// Watches a cluster until it ends.
pub(crate) struct Watch {
    pub(crate) after: Duration,
    /// The program with the hidden subcommand.
    pub(crate) program: PathBuf,
    pub(crate) paths: Paths,
    pub(crate) state: watch::Receiver<ClusterState>,
    pub(crate) stopper: Stopper,
}

impl Watch {
    /// Looks a few times within the time that a stall takes to be one.
    pub(crate) async fn run(mut self) {
        let began = Instant::now();
        let mut patience = Patience::new(self.after);
        let mut eye = Eye::new(self.program.clone());
        let mut sight = Sight::default();
        let every = (self.after / 8).clamp(BETWEEN[0], BETWEEN[1]);
        let ends = |state: &ClusterState| state.ended_at.is_some();
        loop {
            // The sender is gone when the supervisor is.
            if tokio::time::timeout(every, self.state.wait_for(ends)).await.is_ok() {
                return;
            }
            let state = self.state.borrow().clone();
            let looked = match state.state.is_at_work() {
                true => Some(eye.look(&Order::of(&state)).await),
                false => None,
            };
            if let Some(news) = looked.as_ref().and_then(|looked| sight.hear(blindness(looked))) {
                self.stopper.unseen(news);
            }
            let seen = looked.and_then(Result::ok);
            let change = match seen {
                Some(seen) => patience.hear(&seen.verdict, began.elapsed()),
                None => patience.interrupt(),
            };
            match (change, seen) {
                (Some(Change::Stalled), Some(seen)) => self.stopper.stalled(Some(Stall {
                    text: seen.verdict.text.clone(),
                    processes: seen.verdict.odd.clone(),
                    evidence: written(&self.paths.stall(), &seen.evidence),
                })),
                (Some(_), _) => self.stopper.stalled(None),
                (None, _) => {}
            }
        }
    }
}

fn written(path: &Path, evidence: &Evidence) -> Option<PathBuf> {
    let text = serde_json::to_vec(evidence).ok()?;
    write_private(path, &text).ok()?;
    Some(path.to_owned())
}

/// Why a look shows nothing, if it does.
fn blindness(looked: &Result<&Seen, String>) -> Option<String> {
    match looked {
        Ok(seen) => seen.evidence.nothing_seen(),
        Err(why) => Some(why.clone()),
    }
}

/// Whether looks show anything. One may fail, while something ends.
#[derive(Debug, Default)]
struct Sight {
    failures: u32,
}

impl Sight {
    /// Looks in turn that have to fail.
    const FAILURES: u32 = 3;

    /// Hears why a look has shown nothing, if it has; what is new: the reason, or that there is
    /// none any more.
    fn hear(&mut self, why: Option<String>) -> Option<Option<String>> {
        let Some(why) = why else {
            let said = self.failures >= Self::FAILURES;
            self.failures = 0;
            return said.then_some(None);
        };
        self.failures = self.failures.saturating_add(1);
        (self.failures == Self::FAILURES).then_some(Some(why))
    }
}

/// Has other processes look.
struct Eye {
    program: PathBuf,
    seen: Option<Seen>,
    /// Why nothing was seen.
    why: String,
    /// The one that looked last, until it has ended.
    last: Option<Child>,
}

impl Eye {
    fn new(program: PathBuf) -> Self {
        Self { program, seen: None, why: String::new(), last: None }
    }

    /// What is seen now, or why nothing is.
    ///
    /// While the kernel holds the one that looked last, this is what that one saw: it is held by
    /// what holds the process that it looked at.
    async fn look(&mut self, order: &Order) -> Result<&Seen, String> {
        let held = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        if self.last.as_mut().is_none_or(|child| !held(child)) {
            self.seen = None;
            let failed = |error| format!("the process that looks can't be started: {error}");
            let started = aside::command(&self.program, SUBCOMMAND).spawn();
            let mut child = started.map_err(failed)?;
            let answer = tokio::time::timeout(LONGEST_LOOK, ask(&mut child, order)).await;
            self.why = match answer {
                Ok(Ok(seen)) => {
                    self.seen = Some(seen);
                    String::new()
                }
                Ok(Err(error)) => format!("the process that looks has given no answer: {error}"),
                Err(_) => format!("the process that looks did not answer within {LONGEST_LOOK:?}"),
            };
            // It has nothing more to say, and need not end by itself.
            let _ = child.start_kill();
            let ended = tokio::time::timeout(END, child.wait()).await;
            self.last = ended.is_err().then_some(child);
        }
        self.seen.as_ref().ok_or_else(|| self.why.clone())
    }
}

async fn ask(child: &mut Child, order: &Order) -> io::Result<Seen> {
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    input.write_all(&serde_json::to_vec(order)?).await?;
    drop(input);
    let mut text = Vec::new();
    BufReader::new(output.take(LONGEST_ANSWER)).read_until(b'\n', &mut text).await?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_nothing_is_seen_is_said_once_and_that_something_is_again() {
        let (mut sight, why) = (Sight::default(), || Some("not permitted".to_owned()));
        assert_eq!(sight.hear(None), None);
        assert_eq!(
            [sight.hear(why()), sight.hear(why())],
            [None, None],
            "it may have been the end"
        );
        assert_eq!(sight.hear(None), None);
        let said: Vec<_> = (0..9).filter_map(|_| sight.hear(why())).collect();
        assert_eq!(said, [why()]);
        assert_eq!(sight.hear(None), Some(None));
        assert_eq!(sight.hear(None), None);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_or_says_nothing_is_the_reason() {
        let order = Order { ranks: Vec::new(), serves: false, engine: None };
        let why = |program: &'static str| {
            let order = &order;
            async move {
                let mut eye = Eye::new(PathBuf::from(program));
                eye.look(order).await.err().unwrap_or_default()
            }
        };
        assert!(why("/nowhere/cuda-cluster").await.contains("can't be started: No such file"));
        assert!(why("true").await.contains("has given no answer"));
    }
}
