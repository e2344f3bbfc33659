//! Which GPUs get workers, and in which order.
//!
//! Does not decide what else a worker gets.
//!
//! *Invariant:* no GPU and no MIG instance is chosen twice; those left out are in `rejected`.

use super::context::{CallerEnvironment, Chosen, Selected};
use super::error::PlanError;
use super::form::Rejected;
use super::{groups, subset};
use crate::ids::GpuIndex;
use crate::spec::{
    ChooseBy, ChooseGpus, ClusterSpec, EngineKind, GpuName, GpuSelection, Treatment,
};
use crate::topology::{ComputeMode, Device, Gpu, Note, Topology};

/// Names the variable that masks and orders CUDA's devices.
pub const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The topology's notes, without those about GPUs that are not used.
pub(super) fn topology_notes(topology: &Topology, selected: &Selected<'_>) -> Vec<Note> {
    let is_used = |gpu: &Gpu| selected.chosen.iter().any(|chosen| chosen.gpu.index == gpu.index);
    let unused = topology.gpus.iter().filter(|gpu| !is_used(gpu));
    let unused: Vec<String> = unused.map(|gpu| Device::Gpu(gpu.index).to_string()).collect();
    topology.notes.iter().filter(|note| !unused.contains(&note.about)).cloned().collect()
}

/// Chooses the GPUs.
pub(super) fn select<'a>(
    topology: &'a Topology,
    spec: &ClusterSpec,
    caller: &CallerEnvironment,
    notes: &mut Vec<Note>,
) -> Result<Selected<'a>, PlanError> {
    if spec.gpus == Some(GpuSelection::None) {
        return Ok(Selected::default());
    }
    if topology.gpus.is_empty() {
        return Err(PlanError::NoGpus {
            machine: machine_name(topology),
            notes: topology.notes.clone(),
        });
    }
    let mut selected = match &spec.gpus {
        Some(GpuSelection::List(names)) => listed(topology, names)?,
        _ => visible(topology, caller, notes)?,
    };
    let named = matches!(spec.gpus, Some(GpuSelection::List(_)));
    if named {
        outside_of_the_callers_mask(topology, &selected, caller, notes);
    } else {
        leave_out_displays(spec, &mut selected, notes);
    }
    leave_out_busy(spec, &mut selected, notes);
    heed_compute_modes(spec, &mut selected, named, notes);
    if selected.chosen.is_empty() {
        let rejected = selected.rejected.iter().map(|r| format!("{}: {}", r.what, r.why)).collect();
        return Err(PlanError::NoGpuLeft { present: topology.gpus.len(), rejected });
    }
    let sizes = spec.gpus_of_programs();
    if !sizes.is_empty() {
        if selected.reason.is_empty() {
            selected.reason =
                format!("{} has {} GPUs", machine_name(topology), topology.gpus.len());
        }
        return groups::share(topology, spec, selected, &sizes, notes);
    }
    let wanted = match &spec.gpus {
        Some(GpuSelection::Choose(choose)) => Some(*choose),
        _ => spec.workers.map(|count| ChooseGpus { count, choose: ChooseBy::default() }),
    };
    let spares = spec.command.spares.filter(|_| spec.engine == Some(EngineKind::Command));
    let with_spares = |wanted: ChooseGpus| {
        let count = wanted.count.saturating_add(spares.unwrap_or(0));
        ChooseGpus { count, ..wanted }
    };
    let wanted = wanted.map(with_spares);
    let usable = selected.chosen.len();
    let mut selected = match wanted.filter(|wanted| wanted.count as usize != usable) {
        Some(wanted) => fewer(topology, selected, wanted, notes)?,
        None => {
            if selected.reason.is_empty() {
                selected.reason = all_of(topology, &selected);
            }
            selected
        }
    };
    if let Some(start) = spec.dask.start_workers.filter(|_| spec.engine == Some(EngineKind::Dask)) {
        start_first(topology, spec, &mut selected, start, notes)?;
    }
    if let Some(spares) = spares.filter(|spares| *spares > 0) {
        keep_spares(topology, spec, &mut selected, spares, notes)?;
    }
    Ok(selected)
}

/// Leaves out GPUs that no process may use, unless they are named; tells of those that fewer may
/// use than are to.
fn heed_compute_modes(
    spec: &ClusterSpec,
    selected: &mut Selected<'_>,
    named: bool,
    notes: &mut Vec<Note>,
) {
    let each = spec.workers_per_gpu.unwrap_or(1);
    let Selected { chosen, rejected, told, .. } = selected;
    let mut tell = |note: Note| {
        if !told.contains(&note) {
            told.push(note);
        }
    };
    chosen.retain(|chosen| match chosen.gpu.compute_mode {
        Some(ComputeMode::Prohibited) => {
            let why =
                "its compute mode is PROHIBITED: no process may use it (nvidia-smi -c DEFAULT)";
            let what = gpu_label(chosen.gpu);
            if named {
                notes.push(Note::new(what, why.to_owned()));
            } else {
                tell(Note::new(what.clone(), format!("left out: {why}")));
                rejected.push(Rejected { what, why: why.to_owned() });
            }
            named
        }
        Some(ComputeMode::ExclusiveProcess) if each > 1 => {
            let text = format!(
                "its compute mode is EXCLUSIVE_PROCESS: without MPS, of {each} workers the first \
                 gets it (nvidia-smi -c DEFAULT)"
            );
            tell(Note::new(gpu_label(chosen.gpu), text));
            true
        }
        _ => true,
    });
}

/// Puts the GPUs whose workers start with the cluster before those whose workers `scale` starts.
fn start_first(
    topology: &Topology,
    spec: &ClusterSpec,
    selected: &mut Selected<'_>,
    start: u32,
    notes: &mut Vec<Note>,
) -> Result<(), PlanError> {
    let (usable, each) = (selected.chosen.len(), spec.workers_per_gpu.unwrap_or(1));
    let count = start.div_ceil(each);
    if count as usize > usable {
        return Err(PlanError::TooFewGpus { wanted: count, usable });
    }
    if (count as usize) < usable {
        let gpus: Vec<&Gpu> = selected.chosen.iter().map(|chosen| chosen.gpu).collect();
        let choice = subset::choose(topology, &gpus, count as usize, ChooseBy::default());
        notes.extend(choice.note);
        let mut order: Vec<usize> = (0..usable).collect();
        // Stable: otherwise the order stays.
        order.sort_by_key(|at| !choice.positions.contains(at));
        selected.chosen = order.into_iter().map(|at| selected.chosen[at]).collect();
        selected.reason.push_str(&format!("; {} start first", choice.reason));
    }
    Ok(())
}

/// Puts the GPUs that only replace others behind those that have a rank from the first start.
fn keep_spares(
    topology: &Topology,
    spec: &ClusterSpec,
    selected: &mut Selected<'_>,
    spares: u32,
    notes: &mut Vec<Note>,
) -> Result<(), PlanError> {
    let usable = selected.chosen.len();
    let ranks = u32::try_from(usable).unwrap_or(u32::MAX).saturating_sub(spares);
    if ranks == 0 {
        return Err(PlanError::TooFewGpus { wanted: spares.saturating_add(1), usable });
    }
    let start = ranks.saturating_mul(spec.workers_per_gpu.unwrap_or(1));
    start_first(topology, spec, selected, start, notes)
}

/// The reason when every usable GPU gets a worker.
fn all_of(topology: &Topology, selected: &Selected<'_>) -> String {
    let all = topology.gpus.len();
    let left = topology
        .gpus
        .iter()
        .filter(|gpu| selected.chosen.iter().any(|chosen| chosen.gpu.index == gpu.index))
        .count();
    match (left, all) {
        (1, 1) => "the only GPU of the machine".to_owned(),
        (1, _) => format!("the only one of the machine's {all} GPUs that can be used"),
        _ if left == all => format!("each of the machine's {all} GPUs gets a worker"),
        _ => format!("each of the {left} usable ones of the machine's {all} GPUs gets a worker"),
    }
}

/// What to call the machine in a sentence.
pub(super) fn machine_name(topology: &Topology) -> String {
    topology.name.clone().unwrap_or_else(|| "this machine".to_owned())
}

/// The whole GPU, or its instances if MIG mode is on.
fn parts(gpu: &Gpu) -> Vec<Chosen<'_>> {
    if gpu.mig.is_empty() && gpu.mig_mode != Some(true) {
        return vec![Chosen { gpu, mig: None }];
    }
    gpu.mig.iter().enumerate().map(|instance| Chosen { gpu, mig: Some(instance) }).collect()
}

fn gpu_label(gpu: &Gpu) -> String {
    format!("GPU {}", gpu.index)
}

/// The GPUs that the caller's `CUDA_VISIBLE_DEVICES` allows, in its order.
fn visible<'a>(
    topology: &'a Topology,
    caller: &CallerEnvironment,
    notes: &mut Vec<Note>,
) -> Result<Selected<'a>, PlanError> {
    let mut selected = Selected::default();
    let mut take = |selected: &mut Selected<'a>, found: Vec<Chosen<'a>>, gpu: &'a Gpu| {
        if found.is_empty() {
            let why = "MIG mode is on and it has no instance".to_owned();
            notes.push(Note::new(gpu_label(gpu), format!("left out: {why}")));
            selected.rejected.push(Rejected { what: gpu_label(gpu), why });
        }
        selected.chosen.extend(found);
    };
    let Some(mask) = caller.variables.get(VISIBLE) else {
        for gpu in &topology.gpus {
            take(&mut selected, parts(gpu), gpu);
        }
        return Ok(selected);
    };
    selected.from_caller = true;
    selected.reason = format!("{VISIBLE}={mask} in the caller's environment");
    for token in mask.split(',').map(str::trim).filter(|_| !mask.trim().is_empty()) {
        // CUDA ignores everything from the first invalid entry on.
        let found = token.parse().ok().and_then(|name: GpuName| resolve(topology, &name).ok());
        let fresh = found.filter(|new| {
            !new.iter().any(|new| selected.chosen.iter().any(|old| old.is_same(new)))
        });
        let Some(found) = fresh else {
            let text = format!("the list {mask} ends at {token:?}, which names no further GPU");
            notes.push(Note::new(VISIBLE, text));
            break;
        };
        selected.by_uuid |= token.starts_with("GPU-");
        selected.chosen.extend(found);
    }
    for gpu in &topology.gpus {
        if !selected.chosen.iter().any(|chosen| chosen.gpu.index == gpu.index) {
            let why = format!("not in {VISIBLE}");
            selected.rejected.push(Rejected { what: gpu_label(gpu), why });
        }
    }
    Ok(selected)
}

/// The GPUs that the user named, in that order.
fn listed<'a>(topology: &'a Topology, names: &[GpuName]) -> Result<Selected<'a>, PlanError> {
    let mut selected = Selected {
        reason: "named by the user".to_owned(),
        instances_named: true,
        ..Selected::default()
    };
    let mut taken: Vec<(String, Chosen<'a>)> = Vec::new();
    for name in names {
        let found = resolve(topology, name)?;
        if found.is_empty() {
            return Err(PlanError::NoGpuLeft {
                present: topology.gpus.len(),
                rejected: vec![format!("GPU {name}: MIG mode is on and it has no instance")],
            });
        }
        let is_instance = match name {
            GpuName::Mig(..) => true,
            GpuName::Uuid(uuid) => uuid.is_mig(),
            GpuName::Index(_) | GpuName::Pci(_) => false,
        };
        selected.instances_named &= is_instance || found.iter().all(|part| part.mig.is_none());
        for new in found {
            if let Some((same, _)) = taken.iter().find(|(_, old)| old.is_same(&new)) {
                return Err(PlanError::GpuTwice { name: name.to_string(), same: same.clone() });
            }
            taken.push((name.to_string(), new));
        }
        selected.by_uuid |= matches!(name, GpuName::Uuid(uuid) if !uuid.is_mig());
    }
    selected.chosen = taken.into_iter().map(|(_, chosen)| chosen).collect();
    Ok(selected)
}

/// What a name means: a GPU, its instances if it is split, or one instance.
fn resolve<'a>(topology: &'a Topology, name: &GpuName) -> Result<Vec<Chosen<'a>>, PlanError> {
    let missing = || PlanError::NoSuchGpu {
        name: name.to_string(),
        present: topology.gpus.iter().map(describe).collect(),
    };
    let by = |wanted: &dyn Fn(&Gpu) -> bool| {
        topology.gpus.iter().find(|gpu| wanted(gpu)).map(parts).ok_or_else(missing)
    };
    match name {
        GpuName::Index(index) => by(&|gpu| gpu.index == *index),
        GpuName::Pci(pci) => by(&|gpu| gpu.pci == Some(*pci)),
        GpuName::Mig(index, at) => {
            let gpu = topology.gpus.iter().find(|gpu| gpu.index == *index).ok_or_else(missing)?;
            let at = *at as usize;
            let instance = gpu.mig.get(at).ok_or_else(missing)?;
            Ok(vec![Chosen { gpu, mig: Some((at, instance)) }])
        }
        GpuName::Uuid(uuid) => {
            let begins = |full: &crate::ids::GpuUuid| full.as_str().starts_with(uuid.as_str());
            let mut found: Vec<(String, Vec<Chosen<'a>>)> = Vec::new();
            for gpu in &topology.gpus {
                if let Some(full) = gpu.uuid.as_ref().filter(|full| begins(full)) {
                    found.push((full.to_string(), parts(gpu)));
                }
                for (at, instance) in gpu.mig.iter().enumerate() {
                    if begins(&instance.uuid) {
                        let chosen = vec![Chosen { gpu, mig: Some((at, instance)) }];
                        found.push((instance.uuid.to_string(), chosen));
                    }
                }
            }
            if found.len() > 1 {
                // An exact match wins over longer UUIDs with this prefix.
                if let Some(at) = found.iter().position(|(full, _)| full == uuid.as_str()) {
                    return Ok(found.swap_remove(at).1);
                }
                let candidates = found.into_iter().map(|(full, _)| full).collect();
                return Err(PlanError::AmbiguousGpu { name: name.to_string(), candidates });
            }
            found.pop().map(|(_, chosen)| chosen).ok_or_else(missing)
        }
    }
}

fn describe(gpu: &Gpu) -> String {
    let mut text = gpu.index.to_string();
    let mut names: Vec<String> = Vec::new();
    names.extend(gpu.uuid.as_ref().map(ToString::to_string));
    names.extend(gpu.pci.map(|pci| pci.to_string()));
    if !gpu.mig.is_empty() {
        names.push(format!("{} MIG instances", gpu.mig.len()));
    }
    if !names.is_empty() {
        text.push_str(&format!(" ({})", names.join(", ")));
    }
    text
}

/// Notes the named GPUs that the caller's mask hides.
fn outside_of_the_callers_mask(
    topology: &Topology,
    selected: &Selected<'_>,
    caller: &CallerEnvironment,
    notes: &mut Vec<Note>,
) {
    if !caller.variables.contains_key(VISIBLE) {
        return;
    }
    let Ok(mask) = visible(topology, caller, &mut Vec::new()) else { return };
    for chosen in &selected.chosen {
        if !mask.chosen.iter().any(|seen| seen.is_same(chosen)) {
            let text = format!("asked for by name, though {VISIBLE} of the caller hides it");
            notes.push(Note::new(gpu_label(chosen.gpu), text));
        }
    }
}

/// Leaves out or notes GPUs that drive a display.
fn leave_out_displays(spec: &ClusterSpec, selected: &mut Selected<'_>, notes: &mut Vec<Note>) {
    let all: Vec<&Gpu> = selected.chosen.iter().map(|chosen| chosen.gpu).collect();
    // A small display card: another model, with less memory than all others.
    let for_the_picture = |gpu: &Gpu| {
        let others: Vec<_> = all.iter().filter(|other| other.display != Some(true)).collect();
        !others.is_empty()
            && others
                .iter()
                .all(|other| other.name != gpu.name && other.memory_bytes > gpu.memory_bytes)
    };
    let mut kept = Vec::new();
    for chosen in &selected.chosen {
        let gpu = chosen.gpu;
        if gpu.display != Some(true) {
            kept.push(*chosen);
            continue;
        }
        let (skip, why) = match spec.display_gpus {
            Some(Treatment::Use) => (false, None),
            Some(Treatment::Warn) => {
                (false, Some("it drives a display, which takes memory and time"))
            }
            Some(Treatment::Skip) => (true, Some("it drives a display")),
            None if for_the_picture(gpu) => {
                (true, Some("it drives a display, and is a smaller model than the other GPUs"))
            }
            None => (false, Some("it drives a display, which takes memory and time")),
        };
        match (skip, why) {
            (true, Some(why)) => {
                let is_asked = spec.display_gpus.is_some();
                let notes = if is_asked { &mut selected.told } else { &mut *notes };
                notes.push(Note::new(gpu_label(gpu), format!("left out: {why}")));
                selected.rejected.push(Rejected { what: gpu_label(gpu), why: why.to_owned() });
            }
            (_, why) => {
                notes.extend(why.map(|why| Note::new(gpu_label(gpu), why)));
                kept.push(*chosen);
            }
        }
    }
    selected.chosen = kept;
}

/// Leaves out or notes GPUs that other processes use.
fn leave_out_busy(spec: &ClusterSpec, selected: &mut Selected<'_>, notes: &mut Vec<Note>) {
    let treatment = spec.busy_gpus.unwrap_or_default();
    let mut noted: Option<GpuIndex> = None;
    selected.chosen.retain(|chosen| {
        let gpu = chosen.gpu;
        if gpu.processes.is_empty() || treatment == Treatment::Use {
            return true;
        }
        let pids: Vec<String> = gpu.processes.iter().map(u32::to_string).collect();
        let word = if pids.len() == 1 { "process" } else { "processes" };
        let why = format!("in use by {word} {}", pids.join(", "));
        let skip = treatment == Treatment::Skip;
        if noted != Some(gpu.index) {
            noted = Some(gpu.index);
            if !skip {
                notes.push(Note::new(gpu_label(gpu), why));
            } else {
                let text = format!("left out: {why}");
                selected.told.push(Note::new(gpu_label(gpu), text));
                selected.rejected.push(Rejected { what: gpu_label(gpu), why });
            }
        }
        !skip
    });
}

/// Picks `count` of the GPUs.
fn fewer<'a>(
    topology: &Topology,
    mut selected: Selected<'a>,
    wanted: ChooseGpus,
    notes: &mut Vec<Note>,
) -> Result<Selected<'a>, PlanError> {
    let usable = selected.chosen.len();
    let count = wanted.count as usize;
    if count > usable {
        return Err(PlanError::TooFewGpus { wanted: wanted.count, usable });
    }
    let gpus: Vec<&Gpu> = selected.chosen.iter().map(|chosen| chosen.gpu).collect();
    let choice = subset::choose(topology, &gpus, count, wanted.choose);
    notes.extend(choice.note);
    for (at, chosen) in selected.chosen.iter().enumerate() {
        if !choice.positions.contains(&at) {
            let what = chosen.name();
            selected.rejected.push(Rejected { what, why: choice.why_not.clone() });
        }
    }
    selected.chosen = choice.positions.iter().map(|at| selected.chosen[*at]).collect();
    let among = match selected.reason.as_str() {
        "" => format!("; the machine has {} GPUs", topology.gpus.len()),
        reason => format!("; {reason}"),
    };
    selected.reason = format!("{}{among}", choice.reason);
    Ok(selected)
}
