//! What a check may ask: the machine, what was seen of it, and what the plan uses of it.
//!
//! *Invariant:* without a plan, everything is used; with one, only what its workers use.

use std::collections::BTreeSet;

use super::evidence::{Evidence, Function, GpuState, Look};
use super::{Check, Cost, Finding, Seen, Severity};
use crate::ids::{GpuIndex, PciAddress};
use crate::plan::{EngineKind, EnginePlan, Plan};
use crate::topology::{Device, Gpu, LinkKind, Links, Nic, Port, PortState, Topology};

/// A machine, what was seen of it, and a plan for it.
#[derive(Debug)]
pub struct Scene<'a> {
    pub(super) evidence: &'a Evidence,
    pub(super) topology: &'a Topology,
    pub(super) plan: Option<&'a Plan>,
    links: Links,
    /// Named here only where a plan names them.
    used: Option<BTreeSet<GpuIndex>>,
}

/// Two GPUs with workers, and what is between them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair<'a> {
    pub(super) a: &'a Gpu,
    pub(super) b: &'a Gpu,
    /// `None` if unknown.
    pub(super) kind: Option<LinkKind>,
}

impl Pair<'_> {
    /// `GPU0 and GPU4`.
    pub(super) fn name(&self) -> String {
        format!("GPU{} and GPU{}", self.a.index, self.b.index)
    }

    /// Whether NVLinks join them.
    pub(super) fn has_nvlink(&self) -> bool {
        matches!(self.kind, Some(LinkKind::Nv(_)))
    }

    /// Whether the driver lets each read the other's memory; `None` if it does not tell.
    pub(super) fn are_peers(&self) -> Option<bool> {
        let peer = |a: &Gpu, b: &Gpu| a.peers.as_ref().map(|peers| peers.contains(&b.index));
        Some(peer(self.a, self.b)? && peer(self.b, self.a)?)
    }
}

/// `1 pair`, `2 pairs`.
pub(super) fn counted(number: impl std::fmt::Display, what: &str) -> String {
    match number.to_string().as_str() {
        "1" => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}

impl<'a> Scene<'a> {
    /// A scene; without a plan, all of the machine is used.
    pub fn new(evidence: &'a Evidence, topology: &'a Topology, plan: Option<&'a Plan>) -> Self {
        let used = plan.map(|plan| {
            let gpus = plan.workers.iter().filter_map(|worker| worker.gpu.as_ref());
            gpus.map(|gpu| gpu.index).collect()
        });
        Self { evidence, topology, plan, links: topology.known_links().into_owned(), used }
    }

    /// Whether the plan has a worker on this GPU.
    pub(super) fn uses(&self, gpu: &Gpu) -> bool {
        self.used.as_ref().is_none_or(|used| used.contains(&gpu.index))
    }

    /// The GPUs that are used.
    pub(super) fn gpus(&self) -> Vec<&'a Gpu> {
        self.topology.gpus.iter().filter(|gpu| self.uses(gpu)).collect()
    }

    /// Used GPUs of the same model as this one, itself included.
    pub(super) fn siblings(&self, gpu: &Gpu) -> Vec<&'a Gpu> {
        let all = self.topology.gpus.iter();
        all.filter(|other| other.name.is_some() && other.name == gpu.name).collect()
    }

    /// Pairs of different used GPUs as a whole: instances of MIG have no peers.
    pub(super) fn pairs(&self) -> Vec<Pair<'a>> {
        let gpus: Vec<&Gpu> =
            self.gpus().into_iter().filter(|gpu| gpu.mig_mode != Some(true)).collect();
        let pair = |a: &'a Gpu, b: &'a Gpu| Pair {
            a,
            b,
            kind: self.links.between(Device::Gpu(a.index), Device::Gpu(b.index)),
        };
        let rest = |at: usize| gpus.iter().skip(at + 1);
        gpus.iter().enumerate().flat_map(|(at, a)| rest(at).map(move |b| pair(a, b))).collect()
    }

    /// The link between a GPU and a NIC, by the NIC's number.
    pub(super) fn link_to_nic(&self, gpu: &Gpu, nic: usize) -> Option<LinkKind> {
        self.links.between(Device::Gpu(gpu.index), Device::Nic(u32::try_from(nic).ok()?))
    }

    /// A function, by its address.
    pub(super) fn function(&self, pci: Option<PciAddress>) -> Option<&'a Function> {
        self.evidence.functions.get(&pci?)
    }

    /// Ports that the plan's workers use, or that are active where there is no plan.
    pub(super) fn ports(&self) -> Vec<(&'a Nic, &'a Port)> {
        let all = self.topology.nics.iter().flat_map(|nic| nic.ports.iter().map(move |p| (nic, p)));
        let used = |(nic, port): &(&Nic, &Port)| match self.plan {
            None => port.state == Some(PortState::Active),
            Some(plan) => plan.workers.iter().flat_map(|worker| &worker.nics).any(|named| {
                named.nic == nic.name && named.port.is_none_or(|number| number == port.port)
            }),
        };
        all.filter(used).collect()
    }

    /// Whether GPUs' memory goes through RDMA adapters.
    pub(super) fn moves_by_rdma(&self) -> bool {
        !self.ports().is_empty() && !self.gpus().is_empty()
    }

    /// The plan's engine.
    pub(super) fn engine(&self) -> Option<EngineKind> {
        self.plan.map(|plan| plan.engine.kind())
    }

    /// Whether its processes may use NCCL: ours does not.
    pub(super) fn may_use_nccl(&self) -> bool {
        self.engine() != Some(EngineKind::Native)
    }

    /// Whether processes elsewhere take part.
    pub(super) fn goes_beyond(&self) -> bool {
        match self.plan.map(|plan| &plan.engine) {
            Some(EnginePlan::Dask(dask)) => {
                let loopback = dask.host.as_deref().is_some_and(|host| {
                    host == "localhost" || host.starts_with("127.") || host == "::1"
                });
                dask.join.is_some() || !loopback
            }
            _ => false,
        }
    }

    /// Workers on a GPU.
    pub(super) fn workers_on(&self, gpu: &Gpu) -> Vec<String> {
        self.workers(|worker| worker.gpu.as_ref().is_some_and(|own| own.index == gpu.index))
    }

    /// Workers that use a NIC.
    pub(super) fn workers_of_nic(&self, nic: &Nic) -> Vec<String> {
        self.workers(|worker| worker.nics.iter().any(|port| port.nic == nic.name))
    }

    /// Names of the plan's workers with a property.
    pub(super) fn workers(&self, which: impl Fn(&crate::plan::WorkerPlan) -> bool) -> Vec<String> {
        let all = self.plan.map(|plan| plan.workers.as_slice()).unwrap_or_default();
        all.iter().filter(|worker| which(worker)).map(|worker| worker.name.clone()).collect()
    }

    /// Judges one fact of each GPU. A GPU that the plan does not use is a note at most.
    pub(super) fn each_gpu<T>(
        &self,
        report: &mut Report,
        from: &str,
        pick: impl Fn(&GpuState) -> &Look<T>,
        bad: impl Fn(&'a Gpu, &T) -> Option<Found>,
    ) {
        let (mut well, mut unseen) = (0, Vec::new());
        for gpu in &self.topology.gpus {
            let Some(state) = self.evidence.gpus.get(&gpu.index.0) else { continue };
            match pick(state) {
                Look::NotThere => {}
                Look::Unseen(why) => unseen.push((format!("GPU{}", gpu.index), why.clone())),
                Look::Seen(value) => match bad(gpu, value) {
                    None => well += 1,
                    Some(found) => report.push(self.of_gpu(gpu, found)),
                },
            }
        }
        report.settle(well, "GPU", from, unseen);
    }

    /// A finding about a GPU: with its name and workers, and a note at most if it is not used.
    pub(super) fn of_gpu(&self, gpu: &Gpu, found: Found) -> Found {
        let found = found.about(format!("GPU{}", gpu.index)).concerns(self.workers_on(gpu));
        match self.uses(gpu) {
            true => found,
            false => found.at_most(Severity::Note),
        }
    }
}

/// What a check has found.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) found: Vec<Found>,
}

impl Report {
    pub(super) fn push(&mut self, found: Found) {
        self.found.push(found);
    }

    pub(super) fn ok(&mut self, text: impl Into<String>) {
        self.push(Found::new(Severity::Ok, text));
    }

    pub(super) fn cannot_tell(&mut self, text: impl Into<String>) {
        self.push(Found::new(Severity::CannotTell, text));
    }

    /// Says what could not be looked at, and, if nothing was found, that the rest is well.
    pub(super) fn settle(
        &mut self,
        well: usize,
        what: &str,
        from: &str,
        unseen: Vec<(String, String)>,
    ) {
        if self.found.is_empty() && well > 0 {
            self.push(Found::new(Severity::Ok, format!("{}: {from}", counted(well, what))));
        }
        // The same reason once, with all that it is about.
        let reasons: BTreeSet<&String> = unseen.iter().map(|(_, why)| why).collect();
        for reason in reasons {
            let about = unseen.iter().filter(|(_, why)| why == reason).map(|(about, _)| about);
            let about: Vec<&str> = about.map(String::as_str).collect();
            let found = Found::new(Severity::CannotTell, format!("{from}: {reason}"));
            self.push(found.about(listed(&about)));
        }
    }

    /// Judges one fact of the machine.
    pub(super) fn one<T>(
        &mut self,
        look: &Look<T>,
        from: &str,
        judged: impl FnOnce(&T) -> Result<String, Found>,
    ) {
        match look {
            Look::NotThere => {}
            Look::Unseen(why) => self.cannot_tell(format!("{from}: {why}")),
            Look::Seen(value) => match judged(value) {
                Ok(text) => self.ok(text),
                Err(found) => self.push(found),
            },
        }
    }
}

/// A few names, and how many more.
pub(super) fn listed(names: &[&str]) -> String {
    const MOST: usize = 4;
    let shown = names.iter().take(MOST).copied().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MOST) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// A finding before it knows its check.
#[derive(Debug)]
pub(super) struct Found {
    severity: Severity,
    about: Option<String>,
    text: String,
    evidence: Vec<Seen>,
    remedy: Option<String>,
    /// Words in the check's remedy, and what stands there for this machine.
    words: Vec<(&'static str, String)>,
    cost: Option<Cost>,
    consequence: Option<String>,
    concerns: Vec<String>,
}

impl Found {
    pub(super) fn new(severity: Severity, text: impl Into<String>) -> Self {
        Self {
            severity,
            about: None,
            text: text.into(),
            evidence: Vec::new(),
            remedy: None,
            words: Vec::new(),
            cost: None,
            consequence: None,
            concerns: Vec::new(),
        }
    }

    pub(super) fn note(text: impl Into<String>) -> Self {
        Self::new(Severity::Note, text)
    }

    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self::new(Severity::Warning, text)
    }

    pub(super) fn error(text: impl Into<String>) -> Self {
        Self::new(Severity::Error, text)
    }

    pub(super) fn about(self, about: impl Into<String>) -> Self {
        Self { about: Some(about.into()), ..self }
    }

    pub(super) fn saw(mut self, from: impl Into<String>, value: impl std::fmt::Display) -> Self {
        self.evidence.push(Seen { from: from.into(), value: value.to_string() });
        self
    }

    pub(super) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// With a value for a word in capitals in the check's remedy.
    pub(super) fn with(mut self, word: &'static str, value: impl Into<String>) -> Self {
        self.words.push((word, value.into()));
        self
    }

    /// With another cost than that of the check's remedy.
    pub(super) fn costs(self, cost: Cost) -> Self {
        Self { cost: Some(cost), ..self }
    }

    pub(super) fn consequence(self, consequence: impl Into<String>) -> Self {
        Self { consequence: Some(consequence.into()), ..self }
    }

    pub(super) fn concerns(mut self, workers: Vec<String>) -> Self {
        for worker in workers {
            if !self.concerns.contains(&worker) {
                self.concerns.push(worker);
            }
        }
        self
    }

    /// Not worse than this.
    pub(super) fn at_most(self, severity: Severity) -> Self {
        Self { severity: self.severity.min(severity), ..self }
    }

    /// With what its check says of every such finding.
    pub(super) fn finding(self, check: &Check) -> Finding {
        let bad = !matches!(self.severity, Severity::Ok | Severity::CannotTell);
        let of_check = |text: &str| (bad && !text.is_empty()).then(|| text.to_owned());
        let remedy = of_check(check.remedy).map(|remedy| {
            self.words.iter().fold(remedy, |text, (word, value)| text.replace(word, value))
        });
        let severity = if check.minor { self.severity.min(Severity::Note) } else { self.severity };
        Finding {
            id: check.id.to_owned(),
            severity,
            about: self.about,
            text: self.text,
            evidence: self.evidence,
            consequence: self.consequence.or(of_check(check.consequence)),
            source: of_check(check.source),
            remedy: self.remedy.or(remedy),
            cost: bad.then_some(self.cost.unwrap_or(check.cost)),
            concerns: self.concerns,
            minor: check.minor,
        }
    }
}
