//! The health of GPUs: memory, errors, clocks, power, modes, and who holds them.
//!
//! *Invariant:* an idle, power-capped or display GPU is healthy.

use super::evidence::{Holder, Look, Xid};
use super::scene::{Found, Report, Scene, counted};
use super::{Check, Cost, Severity, xid};
use crate::topology::{ComputeMode, Gpu};
use crate::units::{HumanBytes, HumanSpan};

pub(super) const CHECKS: &[Check] = &[
    Check {
        id: "row-remap",
        title: "rows of memory that were replaced",
        looks_at: "nvmlDeviceGetRemappedRows",
        consequence: "with a failure the GPU's memory cannot be trusted; pending rows are used \
                      until a reset",
        source: "NVIDIA, GPU memory error management",
        remedy: "nvidia-smi --gpu-reset -i GPU for pending rows; exchange the GPU after a failure",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(remap),
    },
    Check {
        id: "retired-pages",
        title: "pages of memory that wait to be retired",
        looks_at: "nvmlDeviceGetRetiredPagesPendingStatus (GPUs before Ampere)",
        consequence: "bad pages are used until the driver is loaded again",
        source: "NVIDIA, Dynamic page retirement",
        remedy: "nvidia-smi --gpu-reset -i GPU, or restart the machine",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(retired),
    },
    Check {
        id: "ecc-errors",
        title: "errors of memory that could not be corrected",
        looks_at: "nvmlDeviceGetTotalEccErrors, uncorrected, since the driver was loaded",
        consequence: "programs that met them were ended; more may follow",
        source: "NVIDIA, GPU memory error management",
        remedy: "reset the GPU, run dcgmi diag -r 3, and exchange it if they come again",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(ecc_errors),
    },
    Check {
        id: "ecc-mode",
        title: "ECC as on siblings",
        looks_at: "nvmlDeviceGetEccMode",
        consequence: "GPUs with and without ECC differ in memory and speed",
        source: "nvidia-smi's manual page, -e",
        remedy: "nvidia-smi -e 1 -i GPU, then a reset",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(ecc_mode),
    },
    Check {
        id: "recovery-action",
        title: "what the driver wants done with a GPU",
        looks_at: "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        consequence: "the GPU does not come back by itself; new programs fail or hang on it",
        source: "nvml.h, nvmlDeviceGpuRecoveryAction_t",
        remedy: "do it: nvidia-smi -q -i GPU says the same",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(recovery),
    },
    Check {
        id: "slowdown",
        title: "clocks that hardware holds down",
        looks_at: "nvmlDeviceGetCurrentClocksEventReasons: hardware slowdown, thermal slowdown, \
                   power brake; a power cap by software is no fault",
        consequence: "the GPU runs at half its clocks or less, and all that wait for it do, too",
        source: "nvml.h, nvmlClocksEventReasons; mlfoundations/open_clip#703",
        remedy: "cooling (thermal), or the power supplies (power brake): see the BMC's log",
        cost: Cost::Hands,
        minor: false,
        judge: Some(slowdown),
    },
    Check {
        id: "power-limit",
        title: "power limits against siblings",
        looks_at: "nvmlDeviceGetEnforcedPowerLimit, against GPUs of the same model",
        consequence: "the GPU with the lower limit is slower under load, and the others wait",
        source: "nvidia-smi's manual page, -pl",
        remedy: "nvidia-smi -pl WATTS -i GPU, as its siblings",
        cost: Cost::Root,
        minor: false,
        judge: Some(power),
    },
    Check {
        id: "persistence",
        title: "a driver that stays loaded",
        looks_at: "nvmlDeviceGetPersistenceMode",
        consequence: "the first program on an idle GPU waits for seconds while it is initialised",
        source: "NVIDIA, Driver persistence",
        remedy: "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1",
        cost: Cost::Root,
        minor: false,
        judge: Some(persistence),
    },
    Check {
        id: "mig-pending",
        title: "a MIG mode that waits for a reset",
        looks_at: "nvmlDeviceGetMigMode, current and pending",
        consequence: "after the next reset the GPU is another machine than it is now",
        source: "NVIDIA, MIG user guide",
        remedy: "nvidia-smi --gpu-reset -i GPU to have it, or nvidia-smi -mig 0|1 to drop it",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(mig),
    },
    Check {
        id: "compute-mode",
        title: "who may use a GPU",
        looks_at: "nvmlDeviceGetComputeMode",
        consequence: "a second process on an exclusive GPU, and any on a prohibited one, gets \
                      error 46",
        source: "CUDA driver API, CUDA_ERROR_DEVICE_UNAVAILABLE",
        remedy: "nvidia-smi -c DEFAULT -i GPU",
        cost: Cost::Root,
        minor: false,
        judge: Some(compute_mode),
    },
    Check {
        id: "memory-held",
        title: "memory that others hold",
        looks_at: "nvmlDeviceGetMemoryInfo and nvmlDeviceGetComputeRunningProcesses",
        consequence: "the worker's memory is not all its own: it runs out in the middle of a job",
        source: "pytorch/pytorch#1085, ray-project/ray#31451, rapidsai/dask-cuda#859",
        remedy: "plan without the GPU ('gpus'), which costs nothing; or ask their owner, and end \
                 the processes named",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(held),
    },
    Check {
        id: "xid",
        title: "errors that the driver wrote since the start of the machine",
        looks_at: "'NVRM: Xid' in the kernel's log",
        consequence: "a fault of the GPU or of its links; it often comes again",
        source: "NVIDIA, Xid errors",
        remedy: "NVIDIA's list says what to do for each number; dcgmi diag -r 3 tests the GPU",
        cost: Cost::Jobs,
        minor: false,
        judge: Some(xids),
    },
];

fn remap(scene: &Scene<'_>, report: &mut Report) {
    let from = "no rows wait to be replaced";
    scene.each_gpu(
        report,
        from,
        |gpu| &gpu.remapped,
        |_, rows| {
            let saw = format!(
                "uncorrectable {}, pending {}, failure {}",
                rows.uncorrectable, rows.pending, rows.failure
            );
            let call = "nvmlDeviceGetRemappedRows";
            match (rows.failure, rows.pending) {
                (true, _) => Some(Found::error("a bad row could not be replaced").saw(call, saw)),
                (_, true) => Some(Found::warning("bad rows wait for a reset").saw(call, saw)),
                _ => None,
            }
        },
    );
}

fn retired(scene: &Scene<'_>, report: &mut Report) {
    scene.each_gpu(
        report,
        "no pages wait",
        |gpu| &gpu.retired_pending,
        |_, pending| {
            let found = Found::warning("bad pages wait to be retired");
            pending.then(|| found.saw("nvmlDeviceGetRetiredPagesPendingStatus", pending))
        },
    );
}

fn ecc_errors(scene: &Scene<'_>, report: &mut Report) {
    scene.each_gpu(
        report,
        "no uncorrected errors",
        |gpu| &gpu.ecc_uncorrected,
        |_, errors| {
            let text = format!("{} of its memory could not be corrected", counted(errors, "error"));
            (*errors > 0)
                .then(|| Found::warning(text).saw("nvmlDeviceGetTotalEccErrors, volatile", errors))
        },
    );
}

fn ecc_mode(scene: &Scene<'_>, report: &mut Report) {
    let on = |gpu: &Gpu| scene.evidence.gpus.get(&gpu.index.0)?.ecc.seen().copied();
    scene.each_gpu(
        report,
        "ECC as their siblings",
        |gpu| &gpu.ecc,
        |gpu, own| {
            let with = scene.siblings(gpu).into_iter().any(|other| on(other) == Some(true));
            let text = "its memory is not checked (ECC is off), and that of its siblings is";
            (!own && with).then(|| Found::note(text).saw("nvmlDeviceGetEccMode", "off"))
        },
    );
}

/// `nvmlDeviceGpuRecoveryAction_t`.
fn action(number: u32) -> &'static str {
    match number {
        1 => "a reset of the GPU",
        2 => "a restart of the machine",
        3 => "no new peer-to-peer work, and an end of what runs",
        4 => "no new peer-to-peer work, and then a reset",
        _ => "an action that this program does not know",
    }
}

fn recovery(scene: &Scene<'_>, report: &mut Report) {
    scene.each_gpu(
        report,
        "nothing wanted",
        |gpu| &gpu.recovery_action,
        |_, wanted| {
            let found = Found::error(format!("the driver wants {}", action(*wanted)));
            let found = found.saw("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", wanted);
            let found = if *wanted == 2 { found.remedy("restart the machine") } else { found };
            (*wanted != 0).then_some(found)
        },
    );
}

/// Bits of `nvmlClocksEventReasons`.
const HARDWARE_SLOWDOWN: u64 = 0x8;
const THERMAL_BY_SOFTWARE: u64 = 0x20;
const THERMAL_BY_HARDWARE: u64 = 0x40;
const POWER_BRAKE: u64 = 0x80;

fn slowdown(scene: &Scene<'_>, report: &mut Report) {
    let from = "clocks are not held down by hardware";
    scene.each_gpu(
        report,
        from,
        |gpu| &gpu.clock_reasons,
        |_, reasons| {
            let has = |bit| reasons & bit != 0;
            let found = if has(POWER_BRAKE) {
                Found::warning("the power supply brakes it (external power brake)")
            } else if has(THERMAL_BY_HARDWARE) {
                Found::warning("it is too hot, and its hardware has halved its clocks")
            } else if has(HARDWARE_SLOWDOWN) {
                Found::warning("its hardware holds its clocks down")
            } else if has(THERMAL_BY_SOFTWARE) {
                Found::note("it is warm, and the driver lowers its clocks")
            } else {
                return None;
            };
            Some(found.saw("nvmlDeviceGetCurrentClocksEventReasons", format!("{reasons:#x}")))
        },
    );
}

fn power(scene: &Scene<'_>, report: &mut Report) {
    let limit = |gpu: &Gpu| scene.evidence.gpus.get(&gpu.index.0)?.power_limit_mw.seen().copied();
    scene.each_gpu(
        report,
        "power limits alike",
        |gpu| &gpu.power_limit_mw,
        |gpu, own| {
            let most = scene.siblings(gpu).into_iter().filter_map(limit).max().unwrap_or(*own);
            let watts = |milliwatts: u32| format!("{} W", milliwatts / 1000);
            let text = format!("its limit is {}, and {} elsewhere", watts(*own), watts(most));
            let saw = "nvmlDeviceGetEnforcedPowerLimit";
            // Limits that differ by a watt are set by firmware.
            (*own + 1000 < most).then(|| Found::warning(text).saw(saw, watts(*own)))
        },
    );
}

fn persistence(scene: &Scene<'_>, report: &mut Report) {
    let daemon = scene.evidence.services.seen();
    let daemon = daemon.is_some_and(|all| all.iter().any(|one| one.starts_with("nvidia-persiste")));
    scene.each_gpu(
        report,
        "the driver stays loaded",
        |gpu| &gpu.persistence,
        |_, on| {
            let text = "the driver forgets it when nobody uses it";
            let found = Found::note(text).saw("nvmlDeviceGetPersistenceMode", "off");
            (!on && !daemon).then_some(found)
        },
    );
}

fn mig(scene: &Scene<'_>, report: &mut Report) {
    scene.each_gpu(
        report,
        "no mode waits",
        |gpu| &gpu.mig_after_reset,
        |gpu, after| {
            let word = |on: bool| if on { "on" } else { "off" };
            let now = gpu.mig_mode == Some(true);
            let text = format!("MIG is {}, and will be {} after a reset", word(now), word(*after));
            let saw = format!("current {}, pending {}", word(now), word(*after));
            (*after != now).then(|| Found::warning(text).saw("nvmlDeviceGetMigMode", saw))
        },
    );
}

fn compute_mode(scene: &Scene<'_>, report: &mut Report) {
    let mut well = 0;
    for gpu in &scene.topology.gpus {
        let workers = scene.workers_on(gpu);
        let found = match gpu.compute_mode {
            None => continue,
            Some(ComputeMode::Prohibited) => Found::warning("no process may use it (PROHIBITED)"),
            // MPS's server is the one process.
            Some(ComputeMode::ExclusiveProcess)
                if workers.len() > 1 && scene.evidence.driver.mps_pipe.seen().is_none() =>
            {
                Found::error(format!(
                    "one process at a time may use it (EXCLUSIVE_PROCESS), and {} workers are \
                     planned",
                    workers.len()
                ))
            }
            Some(ComputeMode::ExclusiveProcess | ComputeMode::Default) => {
                well += 1;
                continue;
            }
        };
        let mode = format!("{:?}", gpu.compute_mode.unwrap_or(ComputeMode::Default));
        report.push(scene.of_gpu(gpu, found.saw("nvmlDeviceGetComputeMode", mode)));
    }
    report.settle(well, "GPU", "compute modes that allow the plan", Vec::new());
}

/// What may be in use on a GPU that nobody uses: the driver's own, a display's.
const USUAL_SHARE: u64 = 20;

/// A process, for people: `4242 python (user 1001, for 3h, 20.0 GiB)`.
fn described(holder: &Holder) -> String {
    let mut more = Vec::new();
    more.extend(holder.uid.map(|uid| format!("user {uid}")));
    let age = |seconds| HumanSpan(std::time::Duration::from_secs(seconds));
    more.extend(holder.age_s.map(|seconds| format!("for {}", age(seconds))));
    more.extend(holder.bytes.map(|bytes| HumanBytes(bytes).to_string()));
    let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join(", ")) };
    let name = holder.name.as_deref().unwrap_or("of a name that cannot be seen");
    match holder.pid {
        0 => format!("a process of another PID namespace{more}"),
        pid => format!("{pid} {name}{more}"),
    }
}

fn held(scene: &Scene<'_>, report: &mut Report) {
    let (mut well, mut unseen) = (0, Vec::new());
    for gpu in &scene.topology.gpus {
        let Some(state) = scene.evidence.gpus.get(&gpu.index.0) else { continue };
        let about = || format!("GPU{}", gpu.index);
        if let (Look::Unseen(why), _) | (Look::Seen(_), Look::Unseen(why)) =
            (&state.used_bytes, &state.holders)
        {
            unseen.push((about(), why.clone()));
            continue;
        }
        let (Some(used), Some(total)) = (state.used_bytes.seen(), gpu.memory_bytes) else {
            continue;
        };
        let holders = state.holders.seen().map(Vec::as_slice).unwrap_or_default();
        // Where GPU memory is a NUMA node, the system's own use counts; on an instance of MIG, its
        // reserve does; a display has its frames.
        let counts =
            gpu.memory_numa.is_none() && gpu.mig_mode != Some(true) && gpu.display != Some(true);
        let found = match holders {
            [] if counts && *used > total / USUAL_SHARE => Found::warning(format!(
                "{} are in use, and no process can be seen: it is in another namespace, or has \
                 left them behind",
                HumanBytes(*used)
            ))
            .remedy("fuser -v /dev/nvidia* as root on the host; a reset frees what is left behind"),
            [] => {
                well += 1;
                continue;
            }
            [first, rest @ ..] => {
                let more = match rest.len() {
                    0 => String::new(),
                    count => format!(", and {count} more"),
                };
                let text = format!("it is in use by {}{more}", described(first));
                let limit = scene.plan.into_iter().flat_map(|plan| &plan.workers);
                let own =
                    limit.filter(|one| one.gpu.as_ref().is_some_and(|g| g.index == gpu.index));
                let wanted: u64 = own.filter_map(|one| one.device_memory_limit_bytes).sum();
                let left = total.saturating_sub(*used);
                match wanted > left {
                    true => Found::warning(format!(
                        "{text}: {} are left, and the plan may take {}",
                        HumanBytes(left),
                        HumanBytes(wanted)
                    )),
                    false => Found::warning(text),
                }
            }
        };
        let saw = format!("{} of {} used", HumanBytes(*used), HumanBytes(total));
        report.push(scene.of_gpu(gpu, found.saw("nvmlDeviceGetMemoryInfo", saw)));
    }
    report.settle(well, "GPU", "nobody uses them", unseen);
}

fn xids(scene: &Scene<'_>, report: &mut Report) {
    let all = match &scene.evidence.xids {
        Look::NotThere => return,
        Look::Unseen(why) => return report.cannot_tell(format!("the kernel's log: {why}")),
        Look::Seen(all) => all,
    };
    for error in all {
        let gpu = scene.topology.gpus.iter().find(|gpu| gpu.pci == Some(error.pci));
        let found = told(error);
        report.push(match gpu {
            Some(gpu) => scene.of_gpu(gpu, found),
            None => found.about(error.pci.to_string()),
        });
    }
    if all.is_empty() {
        report.ok("none in the kernel's log, as far as it goes back");
    }
}

fn told(error: &Xid) -> Found {
    let Xid { pci, xid: number, ago_s, count } = error;
    let ago = ago_s.map(|seconds| HumanSpan(std::time::Duration::from_secs(seconds)));
    let when = ago.map(|ago| format!(", last {ago} ago")).unwrap_or_default();
    let times = if *count > 1 { format!("{count} times") } else { "once".to_owned() };
    let text = format!("Xid {number}, {}, {times}{when}", xid::meaning(u64::from(*number)));
    let (severity, consequence) = match xid::is_hardware(*number) {
        true => (Severity::Warning, None),
        // Most often it is a program that read where it must not.
        false => (Severity::Note, Some("most often a program's own fault, which ended it")),
    };
    let found = Found::new(severity, text).saw("kernel log", format!("Xid ({pci}): {number}"));
    match consequence {
        Some(consequence) => found.consequence(consequence).remedy("nothing, if it was a program"),
        // Whoever powers the machine off ends more than the GPU's jobs.
        None if *number == 79 => found.remedy(xid::remedy(79)).costs(Cost::Restart),
        None => found.remedy(xid::remedy(*number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_described_by_what_is_known_of_it() {
        let holder = Holder { pid: 4242, ..Holder::default() };
        assert_eq!(described(&holder), "4242 of a name that cannot be seen");
        let known = Holder { name: Some("python".to_owned()), uid: Some(1001), ..holder };
        assert_eq!(described(&known), "4242 python (user 1001)");
        let elsewhere = Holder { bytes: Some(1 << 30), ..Holder::default() };
        assert_eq!(described(&elsewhere), "a process of another PID namespace (1.0 GiB)");
    }
}
