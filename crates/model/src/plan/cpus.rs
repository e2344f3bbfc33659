//! Which CPUs each worker gets.
//!
//! Does not bind anything; the shim does.
//!
//! *Invariant:* every share is a subset of the allowed CPUs. Under `split` the shares consist of
//! whole cores, are disjoint, and cover every core that is near some worker.

use super::error::PlanError;
use crate::cpuset::CpuSet;
use crate::topology::{Gpu, Note, NumaNode, Topology};

/// The allowed CPUs near one GPU, and how they were found.
#[derive(Clone, Debug)]
pub(super) struct Near {
    pub(super) cpus: CpuSet,
    pub(super) reason: String,
}

/// The allowed CPUs; `None` if the topology lists no CPUs.
pub(super) fn allowed(topology: &Topology) -> Option<CpuSet> {
    let everything = topology.cpus().or_else(|| {
        let of_gpus = topology.gpus.iter().filter_map(|gpu| gpu.cpus.as_ref());
        of_gpus.fold(None, |all: Option<CpuSet>, more| Some(all.unwrap_or_default().union(more)))
    });
    match (&topology.allowed, everything) {
        (Some(allowed), Some(all)) => {
            let both = allowed.cpus.intersection(&all);
            // Some sources list only part of the CPUs; the others are allowed all the same.
            Some(if both.is_empty() { allowed.cpus.clone() } else { both })
        }
        (Some(allowed), None) => Some(allowed.cpus.clone()),
        (None, all) => all,
    }
}

/// The allowed CPUs near a GPU.
pub(super) fn near(topology: &Topology, gpu: &Gpu, notes: &mut Vec<Note>) -> Option<Near> {
    let allowed = allowed(topology)?;
    let (local, source) = local(topology, gpu, notes);
    let Some(local) = local else {
        let text = format!("{source}: it gets every allowed CPU");
        notes.push(Note::new(format!("GPU {}", gpu.index), text));
        return Some(Near { cpus: allowed, reason: format!("{source}, so every allowed CPU") });
    };
    let usable = local.intersection(&allowed);
    if usable.is_empty() {
        let about = format!("GPU {}", gpu.index);
        let none = format!("none of its CPUs ({local}) is among the allowed ones ({allowed})");
        let beside = of_package(topology, gpu, &local).intersection(&allowed);
        if !beside.is_empty() {
            notes
                .push(Note::new(about, format!("{none}: it gets those of its package ({beside})")));
            let reason =
                format!("{source}, but none of them ({local}) is allowed, so those of its package");
            return Some(Near { cpus: beside, reason });
        }
        notes.push(Note::new(about, format!("{none}: it gets the allowed ones")));
        let reason =
            format!("{source}, but none of them ({local}) is allowed, so every allowed CPU");
        return Some(Near { cpus: allowed, reason });
    }
    let reason = if usable.len() < local.len() {
        format!("{source}, without {} that are not allowed", local.difference(&allowed))
    } else {
        source
    };
    Some(Near { cpus: usable, reason })
}

/// The CPUs of the packages that hold a GPU's NUMA nodes or its local CPUs.
fn of_package(topology: &Topology, gpu: &Gpu, local: &CpuSet) -> CpuSet {
    let nodes = &topology.numa;
    let near = |node: &&NumaNode| {
        gpu.numa == Some(node.id)
            || gpu.numa_set.as_ref().is_some_and(|set| set.contains(node.id.0))
            || node.cpus.as_ref().is_some_and(|cpus| !cpus.intersection(local).is_empty())
    };
    let packages: Vec<u32> = nodes.iter().filter(near).filter_map(|node| node.package).collect();
    let beside = nodes.iter().filter(|node| node.package.is_some_and(|p| packages.contains(&p)));
    beside.filter_map(|node| node.cpus.as_ref()).fold(CpuSet::new(), |all, cpus| all.union(cpus))
}

/// The CPUs near a GPU according to the topology, and which part of it says so.
fn local(topology: &Topology, gpu: &Gpu, notes: &mut Vec<Note>) -> (Option<CpuSet>, String) {
    if let Some(cpus) = gpu.cpus.as_ref().filter(|cpus| !cpus.is_empty()) {
        let place = gpu.numa.map_or_else(String::new, |numa| format!(", NUMA node {numa}"));
        return (Some(cpus.clone()), format!("CPUs near GPU {}{place}", gpu.index));
    }
    let nodes: Vec<u32> = match (&gpu.numa_set, gpu.numa) {
        (Some(set), _) if !set.is_empty() => set.iter().collect(),
        (_, Some(numa)) => vec![numa.0],
        _ => return (None, "its NUMA node is unknown".to_owned()),
    };
    let of = |wanted: &dyn Fn(&crate::topology::NumaNode) -> bool| {
        let known = topology.numa.iter().filter(|node| wanted(node));
        let all = known.filter_map(|node| node.cpus.clone()).reduce(|a, b| a.union(&b));
        all.filter(|cpus| !cpus.is_empty())
    };
    let names: Vec<String> = nodes.iter().map(u32::to_string).collect();
    let plural = if nodes.len() == 1 { "NUMA node" } else { "NUMA nodes" };
    let names = format!("{plural} {}", names.join(", "));
    if let Some(cpus) = of(&|node| nodes.contains(&node.id.0)) {
        return (Some(cpus), format!("CPUs of {names}, which GPU {} is on", gpu.index));
    }
    // The node has memory only, or its CPUs are offline: use the CPUs of its package.
    let packages: Vec<u32> = topology
        .numa
        .iter()
        .filter(|node| nodes.contains(&node.id.0))
        .filter_map(|node| node.package)
        .collect();
    match of(&|node| node.package.is_some_and(|package| packages.contains(&package))) {
        Some(cpus) => {
            let text = format!("{names} has no CPU: it gets those of its package");
            notes.push(Note::new(format!("GPU {}", gpu.index), text));
            (Some(cpus), format!("{names} has no CPU, so those of its package"))
        }
        None => (None, format!("{names} has no CPU that is known")),
    }
}

/// The physical cores inside a set. A CPU that belongs to no known core counts as a core.
pub(super) fn cores(topology: &Topology, cpus: &CpuSet) -> Vec<CpuSet> {
    let mut cores: Vec<CpuSet> = topology
        .cores
        .iter()
        .map(|core| core.intersection(cpus))
        .filter(|core| !core.is_empty())
        .collect();
    let covered = cores.iter().fold(CpuSet::new(), |all, core| all.union(core));
    cores.extend(cpus.difference(&covered).iter().map(|cpu| std::iter::once(cpu).collect()));
    cores.sort_by_key(|core| core.first());
    cores
}

/// Shares cores among workers: `near[w]` are the CPUs near worker `w`.
///
/// Cores are never split, because two workers on hyperthreads of one core compete for its L1 cache.
/// Cores that are near the same workers are shared out as runs of neighbours, in worker order, such
/// that the worker with the fewest cores catches up first. If the number of cores does not divide
/// evenly, the first workers get one more each.
pub(super) fn share_cores(cores: &[CpuSet], near: &[CpuSet]) -> Result<Vec<CpuSet>, PlanError> {
    // Cores grouped by the workers they are near. Groups with the fewest workers go first, because
    // no other worker can use their cores.
    let mut groups: Vec<(Vec<usize>, Vec<&CpuSet>)> = Vec::new();
    for core in cores {
        let takers: Vec<usize> = (0..near.len())
            .filter(|worker| !core.intersection(&near[*worker]).is_empty())
            .collect();
        if takers.is_empty() {
            continue;
        }
        match groups.iter_mut().find(|(known, _)| *known == takers) {
            Some((_, group)) => group.push(core),
            None => groups.push((takers, vec![core])),
        }
    }
    groups.sort_by_key(|(takers, _)| takers.len());
    let mut shares = vec![CpuSet::new(); near.len()];
    let mut counts = vec![0usize; near.len()];
    for (takers, group) in &groups {
        let quotas = level_up(takers, &counts, near, group.len());
        let mut rest = group.as_slice();
        for (worker, quota) in takers.iter().zip(quotas) {
            let (mine, others) = rest.split_at(quota);
            rest = others;
            counts[*worker] += quota;
            for core in mine {
                shares[*worker] = shares[*worker].union(core);
            }
        }
    }
    match counts.iter().position(|count| *count == 0) {
        None => Ok(shares),
        Some(poor) => {
            let mine = near[poor].clone();
            let rivals = near.iter().filter(|other| !other.intersection(&mine).is_empty()).count();
            let cores = cores.iter().filter(|core| !core.intersection(&mine).is_empty()).count();
            Err(PlanError::TooFewCores { workers: rivals, cores, cpus: mine.to_string() })
        }
    }
}

/// How many of `cores` each taker gets so that their totals are as equal as possible. Among equal
/// totals, the taker with the fewest near CPUs comes first.
fn level_up(takers: &[usize], counts: &[usize], near: &[CpuSet], cores: usize) -> Vec<usize> {
    let mut quotas = vec![0usize; takers.len()];
    let hopes: Vec<usize> = takers.iter().map(|worker| near[*worker].len()).collect();
    for _ in 0..cores {
        let poorest =
            (0..takers.len()).min_by_key(|at| (counts[takers[*at]] + quotas[*at], hopes[*at]));
        if let Some(poorest) = poorest {
            quotas[poorest] += 1;
        }
    }
    quotas
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        text.parse().expect(text)
    }

    fn smt(cores: u32) -> Vec<CpuSet> {
        (0..cores).map(|core| [core, core + cores].into_iter().collect()).collect()
    }

    #[test]
    fn the_first_workers_get_the_remainder() {
        let shares = share_cores(&smt(7), &vec![set("0-13"); 3]).expect("enough cores");
        assert_eq!(shares, ["0-2,7-9", "3-4,10-11", "5-6,12-13"].map(set));
    }

    #[test]
    fn more_workers_than_cores_is_an_error() {
        let error = share_cores(&smt(2), &vec![set("0-3"); 3]).expect_err("too few");
        let expected = PlanError::TooFewCores { workers: 3, cores: 2, cpus: "0-3".to_owned() };
        assert_eq!(error, expected);
    }

    proptest! {
        #[test]
        fn shares_are_whole_disjoint_and_complete(
            cores in 1u32..40,
            masks in vec(vec(any::<bool>(), 40), 1..8),
        ) {
            let all = smt(cores);
            let near: Vec<CpuSet> = masks
                .iter()
                .map(|mask| {
                    let mine = all.iter().zip(mask).filter(|(_, take)| **take).map(|(core, _)| core);
                    mine.fold(CpuSet::new(), |set, core| set.union(core))
                })
                .collect();
            let wanted = near.iter().fold(CpuSet::new(), |set, more| set.union(more));
            if let Ok(shares) = share_cores(&all, &near) {
                let mut seen = CpuSet::new();
                for (share, near) in shares.iter().zip(&near) {
                    prop_assert!(share.is_subset(near));
                    prop_assert!(share.intersection(&seen).is_empty());
                    seen = seen.union(share);
                    for core in &all {
                        let part = core.intersection(share);
                        prop_assert!(part.is_empty() || part == *core, "a core is torn apart");
                    }
                }
                prop_assert_eq!(seen, wanted);
            }
        }

        #[test]
        fn equal_workers_differ_by_at_most_one_core(cores in 1u32..60, workers in 1usize..9) {
            let all = smt(cores);
            let near = vec![all.iter().fold(CpuSet::new(), |set, core| set.union(core)); workers];
            match share_cores(&all, &near) {
                Ok(shares) => {
                    let sizes: Vec<usize> = shares.iter().map(|share| share.len() / 2).collect();
                    let (least, most) = (sizes.iter().min(), sizes.iter().max());
                    prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1));
                    prop_assert!(sizes.is_sorted_by(|a, b| a >= b));
                }
                Err(_) => prop_assert!((cores as usize) < workers),
            }
        }
    }
}
