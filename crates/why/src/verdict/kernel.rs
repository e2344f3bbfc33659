//! What the kernel's messages say of a job's ranks.
//!
//! *Invariant:* a message is told of only with the rank whose GPU, process or thread it names.

use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::preflight::xid_meaning;

use super::Kind;
use crate::condition::short;
use crate::evidence::{Evidence, KernelMessage, Rank, Told};

/// The most messages that are told of, the last ones.
const MOST: usize = 3;

/// What a message says of a rank.
pub(super) struct Said {
    pub(super) rank: String,
    pub(super) text: String,
    /// What it makes of a rank that nothing else explains.
    pub(super) kind: Kind,
}

/// What the messages say of ranks; each thing once, when it was said last.
pub(super) fn said(evidence: &Evidence) -> Vec<Said> {
    let mut all: Vec<(Said, u64)> = Vec::new();
    for message in &evidence.kernel {
        let Some((said, ago_ms)) = of(evidence, message) else { continue };
        all.retain(|(known, _)| (&known.rank, &known.text) != (&said.rank, &said.text));
        all.push((said, ago_ms));
    }
    all.drain(..all.len().saturating_sub(MOST));
    let dated = all.into_iter().map(|(said, ago_ms)| Said {
        text: format!("{}, {} ago", said.text, short(ago_ms)),
        ..said
    });
    dated.collect()
}

fn of(evidence: &Evidence, message: &KernelMessage) -> Option<(Said, u64)> {
    let (rank, text, kind) = match message.told()? {
        Told::Xid { gpu, number } => {
            let has = |rank: &&Rank| rank.gpu.as_deref().is_some_and(|own| is_at(own, gpu));
            let ranks = evidence.ranks.iter().filter(has);
            let names: Vec<&str> = ranks.map(|rank| rank.name.as_str()).collect();
            let rank = (*names.first()?).to_owned();
            let meaning = xid_meaning(number);
            let whose = names.join(" and ");
            let text =
                format!("the driver reported Xid {number} ({meaning}) of the GPU of {whose}");
            (rank, text, Kind::Device)
        }
        Told::Hung { tid, name, seconds } => {
            let with = |process: &&crate::evidence::Process| {
                process.threads.iter().any(|thread| thread.tid == tid)
            };
            let rank = evidence.processes.iter().find(with)?.rank.clone();
            let text = format!(
                "the kernel said that thread {tid} ({name}) of {rank} had been blocked for more \
                 than {seconds} s"
            );
            (rank, text, Kind::File)
        }
        Told::Killed { pid, name, group } => {
            let of_process = evidence.process(pid).map(|process| process.rank.clone());
            let is = |rank: &&Rank| rank.pid == Some(pid) || rank.last_pid == Some(pid);
            let root = || evidence.ranks.iter().find(is).map(|rank| rank.name.clone());
            let rank = of_process.or_else(root)?;
            let of = if group { " of its control group" } else { "" };
            let text = format!(
                "the kernel killed process {pid} ({name}) of {rank}, because the memory{of} had \
                 run out"
            );
            (rank, text, Kind::Memory)
        }
    };
    Some((Said { rank, text, kind }, message.ago_ms))
}

/// Whether an address is that of a GPU of which the driver names no function.
fn is_at(own: &str, gpu: PciAddress) -> bool {
    let own = own.parse::<PciAddress>();
    own.is_ok_and(|own| (own.domain, own.bus, own.device) == (gpu.domain, gpu.bus, gpu.device))
}
