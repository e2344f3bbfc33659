//! Puts the decisions of the other modules together into a plan.
//!
//! Does not decide about any single resource; `gpus`, `network`, `shares`, `ucx` and `workers` do.
//!
//! *Invariant:* a plan that is returned under `strict` has only notes that follow from what was
//! asked for itself.

use std::collections::{BTreeMap, BTreeSet};

use super::context::{CallerEnvironment, Chosen, Context, slots};
use super::error::PlanError;
use super::form::{
    Binding, LimitPlan, Machine, Plan, Requirements, SchedulerPlan, Supervision, UcxPlan, VERSION,
    Why,
};
use super::gpus::{VISIBLE, machine_name};
use super::memory::{TERMINATE, TERMINATE_VARIABLE};
use super::variables::{NET_DEVICES, Situation, connects, is_used, with_protocol};
use super::{beyond, exposed, gpus, hosts, network, options, rates, shares, ucx, unused, workers};
use crate::spec::{
    EngineKind, Limit, MemoryPolicy, Most, Origin, Problem, Request, SpecError, Ulimit, UlimitSpec,
};
use crate::topology::{Device, Gpu, LinkKind, Note, NvLinkPeer, Topology};
use crate::units::{Bytes, HumanBytes, Size};

/// Decides everything that `up` does.
///
/// # Errors
/// If something that was asked for does not exist or cannot be shared out; under `strict`, also if
/// the plan would have a note that does not follow from what was asked for itself.
pub fn plan(
    topology: &Topology,
    request: &Request,
    caller: &CallerEnvironment,
) -> Result<Plan, PlanError> {
    let asked = with_protocol(&request.spec, caller);
    let hosts = hosts::divide(&asked, caller);
    let spec = &*hosts.for_here(asked);
    let mut selection_notes = Vec::new();
    let selected = gpus::select(topology, spec, caller, &mut selection_notes)?;
    let mut notes = gpus::topology_notes(topology, &selected);
    notes.extend(selection_notes);
    let slots = slots(spec, &selected);
    let context = Context {
        topology,
        spec,
        caller,
        engine: spec.engine.unwrap_or_default(),
        selected: &selected,
        slots: &slots,
    };
    context.one_address_for_each()?;
    context.within_the_device()?;
    let mut told = selected.told.clone();
    context.nvlink_is_there(&mut notes);
    context.mig(&mut notes, &mut told);
    let network::Network { shares: nics, rdma } = network::share(&context, &mut notes)?;
    let shares = shares::share(&context, &mut notes)?;
    let rails = nics.iter().map(|share| share.ports.len()).max().unwrap_or(0);
    let elastic = network::elastic(&context, &nics);
    let variables = ucx::variables(&context.situation(rails, rdma, elastic));
    notes.extend(variables.notes.iter().cloned());
    told.extend(variables.told.iter().cloned());
    notes.extend(unused::notes(&context, &variables));

    let mut origins = request.origins.clone();
    origins.extend(variables.origins.clone());
    if selected.from_caller {
        origins.insert(VISIBLE.to_owned(), Origin::Environment);
    }
    let everywhere = network::everywhere(&context, &nics);
    let mut client_env = variables.env.clone();
    client_env.extend(everywhere.map(|devices| (NET_DEVICES.to_owned(), devices)));
    let workers = workers::plan(&context, &nics, &shares, &variables, &mut notes)?;
    notes.extend(beyond::notes(&context, &workers));
    if spec.strict == Some(true) && !notes.is_empty() {
        return Err(PlanError::Strict { notes: without_repetition(notes) });
    }
    let engine = hosts.told_to(options::of(&context, &workers));
    // What was asked for and is done is no objection, however open it is.
    told.extend(exposed::notes(&engine));
    notes.extend(told);
    Ok(Plan {
        version: VERSION,
        name: spec.name.clone().unwrap_or_default(),
        engine,
        machine: Machine {
            name: topology.name.clone(),
            source: topology.source.clone(),
            simulated: spec.simulate.unwrap_or(false),
        },
        scheduler: context.scheduler(&shares, &client_env),
        workers,
        client_env,
        requirements: Requirements {
            nvlink: spec.ucx.nvlink.unwrap_or(false),
            strict: spec.strict.unwrap_or(false),
            verify: spec.verify.unwrap_or(false),
        },
        ucx: is_used(spec, context.engine).then(|| UcxPlan {
            version: spec.ucx.version.or(caller.ucx_version),
            preset: spec.ucx.preset.unwrap_or_default(),
        }),
        supervision: supervision(&context)?,
        origins,
        notes: without_repetition(notes),
    })
}

/// An error about a value that this machine contradicts.
fn refuse<T>(key: &str, message: String, hint: &'static str) -> Result<T, PlanError> {
    let problem = Box::new(Problem::Contradiction { message, hint });
    Err(SpecError::new("plan", key.to_owned(), problem).into())
}

fn without_repetition(notes: Vec<Note>) -> Vec<Note> {
    let mut seen = BTreeSet::new();
    notes.into_iter().filter(|note| seen.insert(note.clone())).collect()
}

/// Whether PCIe reaches all of each GPU's memory at once. A part of a GPU does not tell.
fn large_windows(chosen: &[Chosen<'_>]) -> Option<bool> {
    let of_one = |chosen: &Chosen<'_>| {
        let (window, memory) = (chosen.gpu.bar1_bytes?, chosen.gpu.memory_bytes?);
        Some(chosen.mig.is_none() && window >= memory)
    };
    chosen.iter().map(of_one).try_fold(true, |all, one| Some(all && one?))
}

impl<'a> Context<'a> {
    /// Checks the values that only the number of workers can contradict.
    fn one_address_for_each(&self) -> Result<(), PlanError> {
        let workers = self.slots.len();
        let worker = &self.spec.worker;
        for (key, address) in [
            ("worker.listen_address", &worker.listen_address),
            ("worker.contact_address", &worker.contact_address),
        ] {
            if address.is_some() && workers > 1 {
                return refuse(
                    key,
                    format!("one address cannot serve {workers} workers"),
                    "leave the address out, or have one worker",
                );
            }
        }
        if let Some(ports) = worker.ports
            && ports.count().is_some_and(|count| (count as usize) < workers)
        {
            return refuse(
                "worker.ports",
                format!("{ports} has fewer ports than there are workers ({workers})"),
                "widen the range, or leave it out for any free ports",
            );
        }
        Ok(())
    }

    /// Checks that the requested sizes fit the GPUs.
    fn within_the_device(&self) -> Result<(), PlanError> {
        let spec = self.spec;
        for slot in self.slots {
            let Some(memory) = slot.chosen.and_then(|chosen| chosen.memory_bytes()) else {
                continue;
            };
            let limit = slot.overridden(|one| one.device_memory_limit);
            let limit = match limit.or(spec.device.memory_limit) {
                Some(Limit::Size(size)) => Some(size),
                _ => None,
            };
            // Managed memory may be larger than the device.
            let fixed = |size: Option<Size>| size.filter(|_| spec.rmm.managed != Some(true));
            let pool = fixed(slot.overridden(|one| one.rmm_pool_size).or(spec.rmm.pool_size));
            let sharing = u64::from(spec.workers_per_gpu.unwrap_or(1));
            let sizes = [
                ("device.memory_limit", limit, 1),
                // Every worker of a GPU allocates it at its start.
                ("rmm.pool_size", pool, sharing),
            ];
            for (key, size, times) in sizes {
                if let Some(Size::Bytes(bytes)) = size
                    && bytes.saturating_mul(times) > memory
                {
                    let (asked, there) = (HumanBytes(bytes), HumanBytes(memory));
                    let asked = match times {
                        1 => format!("{asked} is"),
                        times => format!("{asked} for each of {times} workers are"),
                    };
                    let name = &slot.name;
                    return refuse(
                        key,
                        format!("{asked} more than the {there} of the GPU of {name}"),
                        "a fraction, like 0.8, is a share of each GPU's own memory",
                    );
                }
            }
            let maximum = spec.rmm.maximum_pool_size;
            if let Some((pool, maximum)) = pool.zip(maximum) {
                let bytes = |size: Size| size.of(memory / sharing.max(1));
                if bytes(pool) > bytes(maximum) {
                    let name = &slot.name;
                    return refuse(
                        "rmm.maximum_pool_size",
                        format!("{maximum} is less than the initial size of {name}'s pool, {pool}"),
                        "make it at least 'rmm.pool_size'",
                    );
                }
            }
        }
        Ok(())
    }

    /// Says that MIG instances have no CUDA IPC, without objection if each was named by the user.
    fn mig(&self, notes: &mut Vec<Note>, told: &mut Vec<Note>) {
        let mig: Vec<&str> = self
            .slots
            .iter()
            .filter(|slot| slot.chosen.is_some_and(|chosen| chosen.mig.is_some()))
            .map(|slot| slot.name.as_str())
            .collect();
        if mig.len() > 1 {
            let names = mig.join(", ");
            let text = format!(
                "{names} have MIG instances: without CUDA IPC they exchange data through host memory"
            );
            let to = if self.selected.instances_named { told } else { notes };
            to.push(Note::new("mig", text));
        }
    }

    /// Whether any two of the chosen GPUs are joined by NVLink; `None` where the source is silent.
    fn nvlink(&self) -> Option<bool> {
        let gpus = self.gpus();
        let links = self.topology.known_links();
        let mut told = !self.topology.nvlinks_untold;
        for (at, a) in gpus.iter().enumerate() {
            for b in &gpus[at + 1..] {
                match links.between(Device::Gpu(a.index), Device::Gpu(b.index)) {
                    Some(LinkKind::Nv(_)) => return Some(true),
                    Some(_) => {}
                    None => told = false,
                }
            }
        }
        // Active links with unknown ends may join them.
        let open = |gpu: &&Gpu| gpu.nvlinks_to(|peer| *peer == NvLinkPeer::Unknown) > 0;
        (told && gpus.iter().filter(|gpu| open(gpu)).count() < 2).then_some(false)
    }

    fn nvlink_is_there(&self, notes: &mut Vec<Note>) {
        if self.spec.ucx.nvlink != Some(true) {
            return;
        }
        let gpus = self.gpus();
        if gpus.is_empty() {
            notes.push(Note::new("ucx.nvlink", "asked for, but there are no GPU workers"));
            return;
        }
        if gpus.len() == 1 {
            return;
        }
        let machine = machine_name(self.topology);
        let chosen = |index| gpus.iter().any(|gpu| gpu.index == index);
        let refused = self.topology.refused_nvlinks();
        let refused = refused.into_iter().find(|(a, b)| chosen(*a) && chosen(*b));
        let text = match self.nvlink() {
            Some(true) => match refused {
                Some((a, b)) => format!(
                    "the driver refuses peer access between GPU {a} and GPU {b} of {machine}, though \
                     their NVLinks are up: is nvidia-fabricmanager well?"
                ),
                None => return,
            },
            Some(false) => format!(
                "asked for, but no two of the chosen GPUs of {machine} are joined by NVLink"
            ),
            None => format!(
                "asked for, but the source does not tell whether the GPUs of {machine} have NVLink"
            ),
        };
        notes.push(Note::new("ucx.nvlink", text));
    }

    fn situation(&self, rails: usize, rdma: bool, elastic: (Vec<String>, bool)) -> Situation<'a> {
        let chosen = &self.selected.chosen;
        Situation {
            spec: self.spec,
            caller: self.caller,
            engine: self.engine,
            gpus: !chosen.is_empty(),
            all_mig: chosen.iter().all(|chosen| chosen.mig.is_some()),
            large_windows: large_windows(chosen),
            peers: rates::between_peers(self.topology, chosen),
            rails,
            rdma,
            elastic: elastic.0,
            other_nics: elastic.1,
            nvlink: self.nvlink(),
        }
    }

    fn scheduler(
        &self,
        shares: &shares::Shares,
        client_env: &BTreeMap<String, String>,
    ) -> Option<SchedulerPlan> {
        if self.engine == EngineKind::Command || self.spec.dask.join.is_some() {
            return None;
        }
        let mut env = client_env.clone();
        env.extend(workers::engine_environment(self));
        env.extend(workers::visible_to_all(self));
        let (cpus, reason) = shares.scheduler.clone();
        let chosen = cpus.as_ref().map_or_else(|| "untouched".to_owned(), ToString::to_string);
        let mut why = vec![Why { choice: "cpus".to_owned(), chosen, reason, rejected: Vec::new() }];
        if connects(self.spec, self.engine) {
            // distributed's UCX listener ignores the interface it is given (distributed#6901).
            why.push(Why {
                choice: "listens on".to_owned(),
                chosen: "every address of this machine, unencrypted".to_owned(),
                reason: "Dask over UCX cannot do otherwise: keep the network closed to strangers"
                    .to_owned(),
                rejected: Vec::new(),
            });
        }
        for (name, value) in self.spec.scheduler.env.iter().flatten() {
            env.insert(name.clone(), value.clone());
            why.push(Why {
                choice: format!("env.{name}"),
                chosen: value.clone(),
                reason: "set by 'scheduler.env'".to_owned(),
                rejected: Vec::new(),
            });
        }
        Some(SchedulerPlan {
            binding: Binding { cpus, mems: None, memory_policy: MemoryPolicy::None },
            env,
            why,
        })
    }
}

fn supervision(context: &Context) -> Result<Supervision, PlanError> {
    let spec = context.spec;
    let asked = &spec.supervision;
    let usual = Supervision::default();
    Ok(Supervision {
        kill_percent: kill_percent(context)?,
        restart: asked.restart.unwrap_or(usual.restart),
        limit: asked.limit.unwrap_or(usual.limit),
        limit_at_work: asked.limit_at_work.or(usual.limit_at_work),
        window: asked.window.unwrap_or(usual.window),
        backoff: asked.backoff.unwrap_or(usual.backoff),
        backoff_max: asked.backoff_max.unwrap_or(usual.backoff_max),
        healthy_after: asked.healthy_after.unwrap_or(usual.healthy_after),
        ready_within: asked.ready_within.unwrap_or(usual.ready_within),
        grace: asked.grace.unwrap_or(usual.grace),
        scheduler_death: asked.scheduler_death.unwrap_or(usual.scheduler_death),
        answer_within: asked.answer_within.unwrap_or(usual.answer_within),
        unresponsive: asked.unresponsive.unwrap_or(usual.unresponsive),
        gpu_free_within: asked.gpu_free_within.unwrap_or(usual.gpu_free_within),
        stalled_after: asked.stalled_after.or(usual.stalled_after),
        end_when_stalled: asked.end_when_stalled.unwrap_or(usual.end_when_stalled),
        audit: asked.audit.unwrap_or(usual.audit),
        log_rotate_bytes: spec.logs.rotate_at.map_or(usual.log_rotate_bytes, |Bytes(bytes)| bytes),
        log_keep: spec.logs.keep.unwrap_or(usual.log_keep),
        pid_file: spec.worker.pid_file.as_ref().map(Into::into),
        ulimits: ulimits(&spec.ulimits),
    })
}

/// The percentage of its limit at which a worker is killed; `None` for never. What stands in the
/// files of Dask's configuration is not known here; the workers tell it when they start.
fn kill_percent(context: &Context) -> Result<Option<f64>, PlanError> {
    let usual = Supervision::default().kill_percent;
    if context.engine != EngineKind::Dask {
        return Ok(usual);
    }
    let config = context.spec.dask.config.as_ref();
    let asked = config.and_then(|config| Some((TERMINATE, config.get(TERMINATE)?)));
    let exported = || Some((TERMINATE_VARIABLE, context.caller.variables.get(TERMINATE_VARIABLE)?));
    let Some((key, text)) = asked.or_else(exported) else { return Ok(usual) };
    if text.eq_ignore_ascii_case("false") {
        return Ok(None);
    }
    match text.parse::<f64>() {
        Ok(share) if share.is_finite() && share >= 0.0 => {
            // Not 55.00000000000001.
            Ok(Some((share * 10_000.0).round() / 100.0))
        }
        _ => refuse(
            key,
            format!("{text:?} is neither a fraction of the memory limit nor false"),
            "write 0.95 for 95 %, or false for never",
        ),
    }
}

fn ulimits(spec: &UlimitSpec) -> BTreeMap<String, LimitPlan> {
    let UlimitSpec { core, memlock, nofile, nproc, stack } = spec;
    let asked = [
        ("core", core),
        ("memlock", memlock),
        ("nofile", nofile),
        ("nproc", nproc),
        ("stack", stack),
    ];
    let most = |limit: Most| match limit {
        Most::Unlimited => None,
        Most::At(most) => Some(most),
    };
    let planned = |Ulimit { soft, hard }: Ulimit| match hard {
        None => LimitPlan::One(most(soft)),
        Some(hard) => LimitPlan::Both { soft: most(soft), hard: most(hard) },
    };
    let asked = asked.into_iter().filter_map(|(name, limit)| Some((name, (*limit)?)));
    asked.map(|(name, limit)| (name.to_owned(), planned(limit))).collect()
}
