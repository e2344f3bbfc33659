//! Preflight: what is wrong with a machine before anything starts, and whether a plan is concerned.
//!
//! Pure: from [`Evidence`], a topology and a plan to [`Finding`]s. Looks at nothing;
//! `probe::evidence` does, and `cluster::doctor` adds what only trying shows.
//!
//! *Invariant:* a check says [`Severity::Ok`] only for what was seen; what could not be looked at
//! is [`Severity::CannotTell`], and what this machine does not have is no finding.

mod advice;
mod driver;
mod evidence;
mod fabric;
mod health;
mod host;
mod network;
mod paths;
mod process;
mod rdma;
mod scene;
mod settings;
mod tried;
mod xid;

use serde::{Deserialize, Serialize};

pub use crate::plan::Advice;
pub use advice::{Audience, advice};
pub use evidence::{
    DeviceFile, Driver, Evidence, Function, FunctionRole, GpuState, Holder, Interface, Look,
    Network, Process, RdmaPort, Record, Remapped, Room, Setting, System, Used, VERSION, Xid,
};
pub use scene::Scene;
pub use xid::meaning as xid_meaning;

use crate::plan::Plan;
use crate::topology::Topology;
use scene::Report;

/// How bad a finding is for the plan at hand, or for the machine where there is no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Looked at, and well.
    Ok,
    /// Worth knowing; nothing is lost by it here.
    Note,
    /// It could not be looked at.
    CannotTell,
    /// Slower or less than the plan counts on.
    Warning,
    /// The plan cannot run, or not safely.
    Error,
}

/// What was seen, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// A file, a call or a variable.
    pub from: String,
    /// What it said.
    pub value: String,
}

/// The result of a check about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The check: the `id` of one of [`checks`].
    pub id: String,
    /// How bad it is.
    pub severity: Severity,
    /// What it is about: `GPU3`, `GPU0 and GPU4`, `mlx5_2:1`; `None` for the machine.
    pub about: Option<String>,
    /// What was found, a sentence without a full stop.
    pub text: String,
    /// What was seen, and where.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Seen>,
    /// What follows from it; only where something is not well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consequence: Option<String>,
    /// Where the consequence is documented or was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What that costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// Workers of the plan that it concerns; all of them where it is about the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub concerns: Vec<String>,
    /// Whether it counts for nothing, because nobody has yet blamed it for anything.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub minor: bool,
}

/// What a remedy costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Nothing: the next start of a program has it.
    Nothing,
    /// Root, and nothing else.
    Root,
    /// Root, and the end of all programs on the GPU.
    Jobs,
    /// A new start of the machine.
    Restart,
    /// A new container.
    Container,
    /// Hands: a cable, a card, a part.
    Hands,
}

impl Cost {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Cost::Nothing => "costs nothing",
            Cost::Root => "needs root, and ends no job",
            Cost::Jobs => "needs root, and ends the jobs on the GPUs concerned",
            Cost::Restart => "needs a restart of the machine, which ends all jobs",
            Cost::Container => "needs a new container: starting the old one again is not enough",
            Cost::Hands => "may need hands: a cable, a card, a part",
        }
    }
}

/// A check: what it looks at, what a bad result means, and what to do.
#[derive(Clone, Copy)]
pub struct Check {
    /// Its name, for people and programs.
    pub id: &'static str,
    /// What it is about, in some words.
    pub title: &'static str,
    /// The files and calls that it looks at.
    pub looks_at: &'static str,
    /// What follows where it is not well.
    pub consequence: &'static str,
    /// Where that is documented or was seen.
    pub source: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// What that costs.
    pub cost: Cost,
    /// Whether it counts for nothing (see [`Finding::minor`]).
    pub minor: bool,
    /// The decision; `None` where the result comes from trying it (`cluster::doctor`).
    judge: Option<fn(&Scene<'_>, &mut Report)>,
}

impl Check {
    /// Whether it judges what was seen; else its result comes from trying.
    pub fn is_judged(&self) -> bool {
        self.judge.is_some()
    }
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Check").field(&self.id).finish()
    }
}

/// Checks of what a plan or a topology notes by itself, too.
const NOTED: [&str; 9] = [
    "fabric-state",
    "nvlink-peers",
    "pcie-width",
    "pcie-slot",
    "numa-node",
    "gpus-missing",
    "compute-mode",
    "allocator",
    "ucx-switches",
];

/// All checks, in the order in which they are shown.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    let families = [
        tried::CHECKS,
        driver::CHECKS,
        health::CHECKS,
        fabric::CHECKS,
        paths::CHECKS,
        rdma::CHECKS,
        process::CHECKS,
        network::CHECKS,
        settings::CHECKS,
        host::CHECKS,
    ];
    families.into_iter().flatten()
}

/// The check of this name.
pub fn check(id: &str) -> Option<&'static Check> {
    checks().find(|check| check.id == id)
}

/// Judges a machine, for a plan if there is one.
pub fn judge(evidence: &Evidence, topology: &Topology, plan: Option<&Plan>) -> Vec<Finding> {
    let scene = Scene::new(evidence, topology, plan);
    let mut findings = Vec::new();
    for check in checks() {
        let Some(judge) = check.judge else { continue };
        let mut report = Report::default();
        judge(&scene, &mut report);
        findings.extend(report.found.into_iter().map(|found| found.finding(check)));
    }
    findings
}

/// Findings, with those that differ only in what they are about as one: `GPU0, GPU1`.
pub fn grouped(findings: &[Finding]) -> Vec<Finding> {
    let mut all: Vec<Finding> = Vec::new();
    for finding in findings {
        let same = |one: &&mut Finding| {
            let (about, concerns) = (one.about.clone(), one.concerns.clone());
            **one == Finding { about, concerns, ..finding.clone() }
        };
        match (all.iter_mut().find(same), &finding.about) {
            (Some(Finding { about: Some(all), concerns, .. }), Some(about)) => {
                *all = format!("{all}, {about}");
                let more = finding.concerns.iter().filter(|worker| !concerns.contains(worker));
                let more: Vec<String> = more.cloned().collect();
                concerns.extend(more);
            }
            _ => all.push(finding.clone()),
        }
    }
    all
}

impl Finding {
    /// A result of a check that was tried rather than seen.
    ///
    /// # Panics
    /// If there is no such check: names are written in the code alone.
    pub fn tried(id: &str, severity: Severity, text: impl Into<String>) -> Self {
        let check = check(id).unwrap_or_else(|| panic!("{id} is in the table"));
        scene::Found::new(severity, text).finding(check)
    }

    /// With another remedy than the check's, whose cost is unknown.
    #[must_use]
    pub fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), cost: None, ..self }
    }

    /// In a line: what it is about, and what to do.
    pub fn one_line(&self) -> String {
        let about = self.about.as_deref().map(|about| format!("{about}: ")).unwrap_or_default();
        let remedy = self.remedy.as_deref().map(|remedy| format!(" ({remedy})"));
        format!("{}: {about}{}{}", self.id, self.text, remedy.unwrap_or_default())
    }

    /// Whether a plan or the topology has a note of its own about it.
    pub fn is_noted(&self) -> bool {
        NOTED.contains(&self.id.as_str())
    }

    /// Whether something is to be done or known.
    pub fn is_bad(&self) -> bool {
        matches!(self.severity, Severity::Warning | Severity::Error)
    }
}
