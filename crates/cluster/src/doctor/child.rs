//! Another process of this program that uses the CUDA driver: a driver that is not well may hang,
//! or end its process.
//!
//! *Invariant:* nobody waits for the other process longer than was said: in the driver no signal
//! reaches it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use cuda_cluster_machine::os::process::own_program;
use cuda_cluster_model::topology::{Gpu, Topology};

/// Time to end after the last word.
const ENDING: Duration = Duration::from_secs(10);

/// How often its end is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// The most that is kept of its standard error.
const ERROR_BYTES: u64 = 1 << 16;

/// A process, and what it says: a line of JSON for each [`Told`](Child::hear).
pub(super) struct Child<Told> {
    child: std::process::Child,
    heard: Receiver<Told>,
    errors: Option<JoinHandle<String>>,
}

/// What was heard.
pub(super) enum Heard<Told> {
    Told(Told),
    /// Nothing within the time.
    Silence,
    /// It says nothing more.
    End,
}

/// How a process ended.
pub(super) struct Ended {
    /// `None` if it had to be killed.
    pub(super) status: Option<ExitStatus>,
    /// The last line that it wrote to standard error.
    pub(super) last_error: Option<String>,
}

impl<Told: DeserializeOwned + Send + 'static> Child<Told> {
    /// Starts a hidden subcommand with these variables, which reads its order from standard input.
    pub(super) fn start(
        subcommand: &str,
        variables: impl IntoIterator<Item = (&'static str, OsString)>,
        order: &impl Serialize,
    ) -> std::io::Result<Self> {
        let mut command = Command::new(own_program());
        // A mask of the caller's is not the workers'.
        command.arg(subcommand).env_remove("CUDA_VISIBLE_DEVICES");
        // UCX writes its log where the answers go.
        command.env_remove("UCX_LOG_LEVEL");
        // It takes UCX 1.21 up to a second to change the code of the functions that it watches, and
        // nothing is registered here.
        command.env("UCX_MEM_EVENTS", "n");
        command.envs(variables);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn()?;
        let (said, heard) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Ok(told) = serde_json::from_str(&line)
                        && said.send(told).is_err()
                    {
                        return;
                    }
                }
            });
        }
        let errors = child.stderr.take().map(|errors| std::thread::spawn(|| text_of(errors)));
        if let Some(mut input) = child.stdin.take() {
            // If it has ended already, its end says why.
            let _ = serde_json::to_writer(&mut input, order).map(|()| input.flush());
        }
        Ok(Self { child, heard, errors })
    }

    /// Waits so long for what it says next.
    pub(super) fn hear(&self, limit: Duration) -> Heard<Told> {
        match self.heard.recv_timeout(limit) {
            Ok(told) => Heard::Told(told),
            Err(RecvTimeoutError::Timeout) => Heard::Silence,
            Err(RecvTimeoutError::Disconnected) => Heard::End,
        }
    }

    /// Kills it.
    pub(super) fn kill(mut self) -> std::io::Result<Ended> {
        self.child.kill()?;
        Ok(Ended { status: None, last_error: None })
    }

    /// Waits for its end, which its silence has announced.
    pub(super) fn end(mut self) -> std::io::Result<Ended> {
        let until = Instant::now() + ENDING;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() >= until {
                return self.kill();
            }
            std::thread::sleep(LOOK);
        };
        let errors = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        let last_error = errors.trim_end().lines().last().map(str::to_owned);
        Ok(Ended { status: Some(status), last_error })
    }
}

fn text_of(errors: ChildStderr) -> String {
    let mut text = String::new();
    // What it wrote before is told all the same.
    let _ = errors.take(ERROR_BYTES).read_to_string(&mut text);
    text
}

/// The mask with which a process sees all whole GPUs of a machine that has MIG instances: CUDA
/// shows a process one instance at most, and then no GPU. `None` where none is needed.
pub(super) fn mask(topology: &Topology) -> Option<(&'static str, OsString)> {
    let whole = topology.gpus.iter().filter(|gpu| is_whole(gpu));
    let names: Option<Vec<&str>> = whole.map(|gpu| Some(gpu.uuid.as_ref()?.as_str())).collect();
    let is_mig = topology.gpus.iter().any(|gpu| !gpu.mig.is_empty());
    let names = names.filter(|_| is_mig)?;
    Some(("CUDA_VISIBLE_DEVICES", names.join(",").into()))
}

/// Whether a GPU is not in MIG mode, in which it runs nothing itself.
pub(super) fn is_whole(gpu: &Gpu) -> bool {
    gpu.mig_mode != Some(true)
}

/// Reads the order, in the other process.
pub(super) fn order<Order: DeserializeOwned>() -> Option<Order> {
    let mut text = String::new();
    std::io::stdin().take(1 << 20).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Says a line, in the other process.
pub(super) fn say(told: &impl Serialize) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    serde_json::to_writer(&mut output, told)?;
    output.write_all(b"\n")?;
    output.flush()
}
