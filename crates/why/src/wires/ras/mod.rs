//! What NCCL's RAS answers about a job: a value, from its text or its JSON.
//!
//! Asks nobody; `look::ras` does. The forms are those of NCCL 2.24 to 2.31
//! (`src/ras/client_support.cc`, and the user guide's chapter on RAS).
//!
//! *Invariant:* a rank is said to be behind only if another rank of its communicator is ahead in
//! the same operation.

mod json;
mod text;

use serde::{Deserialize, Serialize};

use super::cause::Cause;
use super::channel::ranges;

/// RAS's answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// `2.27.3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<String>,
    pub communicators: Vec<Communicator>,
    /// Processes that have given no data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Process>,
    /// Processes that RAS has given up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead: Vec<Process>,
    /// How many answers RAS has waited for in vain.
    #[serde(default)]
    pub timeouts: u64,
}

/// A communicator, or several alike of which nothing but that is said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Communicator {
    /// `#0-0`; `#0` for all of a group; a number in JSON.
    pub name: String,
    /// What NCCL's own lines call it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hash: String,
    /// How many communicators these are.
    pub alike: u64,
    /// The ranks of each.
    pub size: u64,
    /// `RUNNING`, `INIT`, `FINALIZE`, `ABORT`, `NOCOMM`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub status: String,
    /// Ranks of which there is no data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Rank>,
    /// The operations of which ranks have launched different numbers; in JSON, all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<Operation>,
    /// What ranks have reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

/// How many of an operation ranks have launched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// `AllGather`; `collective` before NCCL 2.26.
    pub name: String,
    /// The most first.
    pub counts: Vec<Count>,
}

/// Ranks that have launched equally many.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    pub launched: u64,
    pub ranks: u64,
    /// Those of them that are named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub named: Vec<Rank>,
}

/// A rank, and where it is, as far as RAS says so.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rank {
    pub rank: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
}

/// A process.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub host: String,
    /// `0`, `0,1`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub gpus: String,
}

/// The value of an answer; `None` if the text is none.
pub fn parse(text: &str) -> Option<Status> {
    json::parse(text).or_else(|| text::parse(text))
}

impl Status {
    /// A sentence for each thing that is odd, the weightiest first; none if nothing is.
    pub fn sentences(&self) -> Vec<String> {
        self.causes().into_iter().map(|(_, sentence)| sentence).collect()
    }

    /// What is wrong, with who: the sentences with their causes.
    pub(super) fn causes(&self) -> Vec<(Cause, String)> {
        let dead = self.dead.iter().map(|process| format!("{process} is dead to RAS"));
        let missing = self.missing.iter().map(|process| format!("{process} gives no data"));
        let ranks = self.communicators.iter().filter_map(Communicator::missing);
        let lost = dead.chain(missing).chain(ranks).map(|text| (Cause::RasMissing, text));
        let failed = self.communicators.iter().flat_map(|one| {
            one.errors.iter().map(|error| format!("communicator {}: {error}", one.name))
        });
        let failed = failed.map(|text| (Cause::RasFailed, text));
        let behind = self.communicators.iter().flat_map(Communicator::behind);
        lost.chain(failed).chain(behind.map(|text| (Cause::RasBehind, text))).collect()
    }
}

impl Communicator {
    fn missing(&self) -> Option<String> {
        let all = self.missing.as_slice();
        let said = match all {
            [] => return None,
            [one] => format!("rank {one} gives no data"),
            _ => format!("ranks {} give no data", numbers(all)),
        };
        Some(format!("communicator {}: {said}", self.name))
    }

    /// Who is behind, or ahead if it is those that are few.
    fn behind(&self) -> Vec<String> {
        let told = |operation: &Operation| {
            let first = operation.counts.first()?;
            let (ahead, late) = (first.launched, operation.counts.get(1..).unwrap_or(&[]));
            let one = |count: &Count| {
                let who = match count.named.as_slice() {
                    [] => format!("{} ranks have", count.ranks),
                    [rank] => format!("rank {rank} has"),
                    named => format!("ranks {} have", numbers(named)),
                };
                let at = match count.launched {
                    0 => "none".to_owned(),
                    last => format!("#{last} last"),
                };
                format!("{who} not launched {} #{ahead} ({at})", operation.name)
            };
            let late: Vec<String> = late.iter().map(one).collect();
            let who = match first.named.as_slice() {
                [] => format!("{} ranks have", first.ranks),
                named => format!("ranks {} have", numbers(named)),
            };
            let text = format!("communicator {}: {}; {who}", self.name, late.join("; "));
            (!late.is_empty()).then_some(text)
        };
        self.operations.iter().filter_map(told).collect()
    }
}

fn numbers(ranks: &[Rank]) -> String {
    ranges(&ranks.iter().map(|one| one.rank).collect::<Vec<_>>())
}

impl std::fmt::Display for Rank {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.process {
            Some(process) => write!(out, "{} ({process})", self.rank),
            None => write!(out, "{}", self.rank),
        }
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "process {} on {}", self.pid, self.host)?;
        match self.gpus.as_str() {
            "" => Ok(()),
            gpus => write!(out, ", GPU {gpus}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The user guide's example of the answer in JSON, with a second rank that is behind.
    const JSON: &str = r#"{
  "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
  "timestamp": "2025-12-19 13:06:53", "communicators_count": 1,
  "communicators": [ {
    "hash": "0xae94423cfbb2ef4a", "secondary_hash": "0x1:0x2", "size": 3, "ranks_count": 2,
    "missing_ranks_count": 1,
    "ranks": [
      { "rank": 0, "host": "192.0.2.1", "pid": 11, "cuda_dev": 0, "nvml_dev": 0,
        "status": { "init_state": 0, "async_error": 0, "finalize_called": false,
                    "destroy_flag": false, "abort_flag": false },
        "collective_counts": { "Broadcast": 2, "AllReduce": 7 } },
      { "rank": 1, "host": "192.0.2.1", "pid": 12, "cuda_dev": 1, "nvml_dev": 1,
        "status": { "init_state": 0, "async_error": 6, "abort_flag": false },
        "collective_counts": { "Broadcast": 2, "AllReduce": 6 } } ],
    "missing_ranks": [
      { "rank": 2, "host": "192.0.2.2", "pid": 13, "cuda_dev": 0, "nvml_dev": 0,
        "status": { "unresponsive": true, "considered_dead": true } } ] } ],
  "ras": { "collection_time_sec": 0.001, "timeouts_count": 2 } }"#;

    #[test]
    fn json_says_who_is_dead_who_has_failed_and_who_is_behind() {
        let status = parse(&format!("a log {{\nOK\n{JSON}\n")).expect("an answer");
        assert_eq!((status.nccl.as_deref(), status.timeouts), (Some("2.29.1"), 2));
        let said = status.sentences();
        assert_eq!(
            said,
            [
                "process 13 on 192.0.2.2, GPU 0 is dead to RAS",
                "communicator 0: rank 2 (process 13 on 192.0.2.2, GPU 0) gives no data",
                "communicator 0: rank 1 (process 12 on 192.0.2.1, GPU 1) reports error 6 (remote \
                 error: a network, or another process that has ended)",
                "communicator 0: rank 1 (process 12 on 192.0.2.1, GPU 1) has not launched \
                 AllReduce #7 (#6 last); ranks 0 have",
            ]
        );
    }

    #[test]
    fn text_names_the_ranks_that_are_behind() {
        let text = "Warnings\n========\n\n#0-0 (27a079b828ff1a75) MISMATCH\n  \
            Communicator ranks have different collective operation counts\n  \
            6 ranks have launched up to operation 6650\n  \
            Rank 0 has launched up to operation 6649 -- GPU 0 managed by process 72 on node n1\n  \
            Rank 5 has not launched any operations -- [process information not found]\n";
        let status = parse(&format!("Job summary\n===========\n\n{text}")).expect("an answer");
        let said = status.sentences();
        assert_eq!(
            said,
            ["communicator #0-0: rank 0 (process 72 on n1, GPU 0) has not launched collective \
              #6650 (#6649 last); rank 5 has not launched collective #6650 (none); 6 ranks have"]
        );
    }

    #[test]
    fn text_names_the_dead_and_the_missing() {
        let text = "Communicators... (2.05s)\n=============\n\n\
            Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n    \
            #  in group  per comm  per node  per comm  in group\n    \
            0         1         4       7-8        32        32   RUNNING  INCOMPLETE\n\n\
            Errors\n======\n\nDEAD\n  1 job process is considered dead (unreachable via the RAS \
            network)\n  Process 84 on node 192.0.2.13 managing GPU 5\n\n\
            #0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  \
            The missing rank: 21\n\nWarnings\n========\n\nTIMEOUT\n  Encountered 2 communication \
            timeouts while gathering communicator data\n";
        let status = parse(text).expect("an answer");
        assert_eq!(status.timeouts, 2);
        let first = &status.communicators[0];
        assert_eq!((first.name.as_str(), first.size, first.status.as_str()), ("#0", 32, "RUNNING"));
        assert_eq!(
            status.sentences(),
            [
                "process 84 on 192.0.2.13, GPU 5 is dead to RAS",
                "communicator #0-0: rank 21 gives no data"
            ]
        );
    }

    #[test]
    fn what_is_no_answer_is_none() {
        for text in ["", "{}", "{\"a\": [1]}", "NCCL INFO Job", "ERROR: Unknown command x\n"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_is_too_odd(cut in 0..JSON.len(), text in "[ -~\n]{0,200}") {
            let half: String = JSON.chars().take(cut).collect();
            let _ = parse(&half);
            let _ = parse(&format!("Job summary\n{text}"));
            let _ = parse(&format!("{JSON}{text}"));
        }
    }
}
