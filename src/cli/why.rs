//! `why`: who keeps a job waiting, and for what.
//!
//! *Invariant:* the program is not asked, stopped or changed.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::output::indented;
use super::sanitize::plain;
use super::{input, output, reach, wires};
use crate::cluster::{self, FindError};
use crate::ids::ClusterName;
use crate::supervise::ClusterState;
use cuda_cluster_why::evidence::{Evidence, VERSION};
use cuda_cluster_why::verdict::{Condition, Standing};
use cuda_cluster_why::{Verdict, judge};

/// The longest bundle that is read: 1,000 processes of 100 threads have less.
const LONGEST_BUNDLE: usize = 256 << 20;

/// Arguments of `why`.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 0 the job is not stalled; 5 it is stalled; 1 it could not be told.
With --read or --ras: 0 nothing wrong is said; 5 a cause is named; 1 there is no line to read.

Examples:
  cuda-cluster why train
  cuda-cluster why train --save train.json         # also keeps what was seen
  cuda-cluster why --bundle train.json             # judges it again, elsewhere
  cuda-cluster why train -o json | jq .verdict
  cuda-cluster why --read rank*.log                # which wires, by lines of NCCL and UCX
  cuda-cluster why --ras                           # asks NCCL's RAS on this machine")]
pub(super) struct Arguments {
    /// The cluster or the job of 'run'; optional if only one is running
    name: Option<ClusterName>,
    /// Write what was seen into a file: no environment, no arguments, but lines of source code
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Judge what '--save' has written, instead of looking
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "save"])]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    wires: wires::Sources,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: output::Form,
}

/// What `why -o json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    version: u32,
    verdict: &'a Verdict,
    evidence: &'a Evidence,
}

/// Looks, judges and prints.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    if arguments.wires.given() {
        return wires::run(&arguments.wires, arguments.output);
    }
    let evidence = match &arguments.bundle {
        Some(path) => read(path)?,
        None => seen(arguments.name.as_ref())?,
    };
    if let Some(path) = &arguments.save {
        output::write_json(path, &evidence)?;
    }
    let verdict = judge(&evidence);
    match arguments.output {
        output::Form::Json => {
            let (verdict, evidence) = (&verdict, &evidence);
            output::print_json(&Answer { version: VERSION, verdict, evidence })?;
        }
        output::Form::Table => output::print_text(&shown(&verdict, &evidence))?,
    }
    Ok(match verdict.standing {
        Standing::Stalled => Exit::Stalled,
        Standing::CannotTell => Exit::Failed,
        Standing::Waiting | Standing::Working | Standing::Idle => Exit::Done,
    })
}

fn seen(name: Option<&ClusterName>) -> Result<Evidence, Failure> {
    let found = match cluster::find(name) {
        Ok(found) => found,
        // Of one that was ended because it was stalled, this is kept.
        Err(FindError::Ended(ended)) if ended.paths.stall().exists() => {
            output::note(&format!("{} has ended; this was seen when it was stalled", ended.name));
            return read(&ended.paths.stall());
        }
        Err(error) => return Err(reach::not_found(error)),
    };
    // A supervisor that does not answer is no obstacle: what it has said last is in its directory.
    let answer = reach::block_on(found.control().read::<ClusterState>("/v1/state"));
    let state = match answer {
        Ok(state) => state,
        Err(error) => match stored(&found.paths.state()) {
            Some(state) => {
                output::note(&"the supervisor does not answer; these are its last known processes");
                state
            }
            None => return Err(error),
        },
    };
    Ok(cluster::look_at(&state))
}

fn stored(path: &Path) -> Option<ClusterState> {
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

fn read(path: &Path) -> Result<Evidence, Failure> {
    let text = input::read(path, LONGEST_BUNDLE).map_err(|error| error.failure("bundle", path))?;
    let unusable = |error: anyhow::Error| {
        let error = error.context(format!("{} is not what 'why --save' writes", path.display()));
        Failure::new(Exit::Usage, error)
    };
    let evidence: Evidence = serde_json::from_str(&text).map_err(|error| unusable(error.into()))?;
    if evidence.version != VERSION {
        let found = evidence.version;
        let error = format!("it has version {found}, and this program reads version {VERSION}");
        return Err(unusable(anyhow::Error::msg(error)));
    }
    Ok(evidence)
}

/// The verdict, then each group of ranks with where it is.
fn shown(verdict: &Verdict, evidence: &Evidence) -> String {
    let mut text = format!("{}\n\n", indented(&verdict.text, ""));
    for group in &verdict.groups {
        let odd = group.ranks.iter().any(|rank| verdict.odd.contains(rank));
        let mark = if odd { "*" } else { " " };
        let ranks = group.ranks.join(", ");
        let what = format!("{mark} {ranks}: {}", lasting(&group.condition));
        text.push_str(&format!("{}\n", indented(&what, "    ")));
        if let Some(place) = &group.condition.place {
            text.push_str(&format!("    {}\n", plain(place)));
        }
        if let Some(code) = &group.condition.code {
            text.push_str(&format!("        {}\n", plain(code)));
        }
        if let Some(place) = &group.condition.own_place {
            text.push_str(&format!("    the rank itself: {}\n", plain(place)));
        }
    }
    for unseen in &evidence.unseen {
        let line = format!("not seen: {}: {}", unseen.what, unseen.why);
        text.push_str(&format!("{}\n", indented(&line, "    ")));
    }
    text
}

fn lasting(condition: &Condition) -> String {
    match condition.for_ms.map(|millis| millis / 1000).filter(|seconds| *seconds > 0) {
        Some(seconds) => format!("{} (has not run for {seconds} s)", condition.text),
        None => condition.text.clone(),
    }
}
