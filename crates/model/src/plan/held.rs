//! Which worker of a plan is meant by what a process sees of the GPUs.
//!
//! *Invariant:* a name that could mean two workers means none.

use super::form::{Plan, WorkerPlan};

/// The worker of the GPU that an entry of `CUDA_VISIBLE_DEVICES` names: a number, a UUID of a GPU
/// or of a MIG instance, or the beginning of one, as CUDA permits.
///
/// Numbers are NVML's, which are CUDA's only under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, or where all
/// GPUs are alike.
pub fn worker_of_gpu<'a>(plan: &'a Plan, entry: &str) -> Option<&'a WorkerPlan> {
    let is_uuid = ["GPU-", "MIG-"].iter().any(|kind| entry.starts_with(kind));
    let index: Option<u32> = entry.parse().ok();
    let mut meant = plan.workers.iter().filter(|worker| {
        worker.gpu.as_ref().is_some_and(|gpu| match index {
            // A number is a whole GPU.
            Some(index) => gpu.index.0 == index && gpu.mig.is_none(),
            None => {
                let uuid = gpu.uuid.as_ref().map(ToString::to_string);
                is_uuid && entry.len() > 4 && uuid.is_some_and(|uuid| uuid.starts_with(entry))
            }
        })
    });
    let first = meant.next()?;
    // Several workers of a GPU are bound alike, but not two GPUs.
    let gpu = |worker: &WorkerPlan| worker.gpu.as_ref().map(|gpu| (gpu.index, gpu.uuid.clone()));
    meant.all(|other| gpu(other) == gpu(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Request;
    use crate::topology::{builtin, parse};

    #[test]
    fn a_worker_is_found_by_what_its_process_sees() {
        let machine = parse(builtin("dgx-h100").expect("built in")).expect("right");
        let request = serde_json::json!({ "engine": "command" });
        let request = serde_json::from_value(request).expect("a spec");
        let request = Request::of(request).expect("no contradictions");
        let plan = super::super::plan(&machine, &request, &Default::default()).expect("a plan");
        let uuid = machine.gpus[3].uuid.as_ref().expect("built-in machines have them").to_string();
        let name = |entry: &str| worker_of_gpu(&plan, entry).map(|worker| worker.name.as_str());
        assert_eq!(name("5"), Some("gpu5"));
        assert_eq!(name(&uuid), Some("gpu3"));
        assert_eq!(name(&uuid[..uuid.len() - 1]), Some("gpu3"));
        for none in ["8", "-1", "", "GPU-", "MIG-", "GPU", "gpu5", "NoDevFiles"] {
            assert_eq!(name(none), None, "{none:?}");
        }
    }
}
