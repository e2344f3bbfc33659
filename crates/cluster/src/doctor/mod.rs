//! Checks whether this machine can run clusters, one requirement at a time: what preflight judges,
//! and what only trying shows.
//!
//! Changes nothing on the machine, except for a control group that is created and removed at once.
//!
//! *Invariant:* a check is `ok` only for what was looked at.

pub mod bandwidth;
mod child;
pub(crate) mod cuda;
mod tries;
pub(crate) mod ucx;

use cuda_cluster_machine::probe::{self, Examined, ProbeError};
use cuda_cluster_model::plan::{EnginePlan, Plan};
use cuda_cluster_model::preflight::{self, Evidence, Finding, Record, Severity, VERSION};
use cuda_cluster_model::text::in_full;
use cuda_cluster_model::topology::Topology;

/// What was seen, for a file.
pub fn record(examined: &Examined) -> Record {
    let Examined { topology, evidence, .. } = examined.clone();
    Record { version: VERSION, topology, evidence }
}

/// Runs all checks: judges what was seen, for a plan if there is one, and tries the rest.
pub async fn doctor(examined: &Result<Examined, ProbeError>, plan: Option<&Plan>) -> Vec<Finding> {
    let nothing = (Topology::default(), Evidence::default());
    let (topology, evidence) = match examined {
        Ok(examined) => (&examined.topology, &examined.evidence),
        Err(_) => (&nothing.0, &nothing.1),
    };
    let planned = plan.map(|plan| plan.workers.as_slice()).unwrap_or_default();
    let rdma = planned.iter().any(|worker| !worker.nics.is_empty());
    let dask = plan.and_then(|plan| match &plan.engine {
        EnginePlan::Dask(dask) => Some(&**dask),
        EnginePlan::Native(_) | EnginePlan::Command(_) => None,
    });
    // What waits for another process goes on beside the rest.
    let topology_of_driver = topology.clone();
    let driver = async {
        let tried = tokio::task::spawn_blocking(move || {
            let caller = probe::caller();
            let (libucp, _) = ucx::chosen(&topology_of_driver, &caller);
            let tried = cuda::cuda(&topology_of_driver, libucp.as_deref());
            let answers = tried.as_ref().is_none_or(|found| found.answers);
            let found = tried.map(|found| found.findings).unwrap_or_default();
            (found, ucx::ucx(answers, &topology_of_driver, rdma, &caller))
        });
        // A panic of a check is a defect of this program, and is told as one.
        tried.await.unwrap_or_else(|error| {
            let text = format!("could not be tried: {error}");
            (vec![Finding::tried("cuda", Severity::CannotTell, text)], Vec::new())
        })
    };
    let (python, (cuda, ucx)) = tokio::join!(tries::python(dask), driver);
    let mut findings = vec![match examined {
        Ok(_) => driver_of(topology),
        Err(error) => {
            let finding = Finding::tried("driver", Severity::Error, in_full(error));
            error.hint().into_iter().fold(finding, Finding::remedy)
        }
    }];
    findings.extend(cuda);
    findings.extend(ucx);
    findings.extend([tries::other_users(), tries::containment(), tries::run_directories(), python]);
    if examined.is_ok() {
        findings.extend(preflight::judge(evidence, topology, plan));
    }
    findings
}

fn driver_of(topology: &Topology) -> Finding {
    let finding = |severity, text: String| Finding::tried("driver", severity, text);
    match (&topology.driver, topology.gpus.len()) {
        (Some(driver), 0) => finding(Severity::Warning, format!("{driver}, which shows no GPU"))
            .remedy("in a container, give it the GPUs (--gpus all)"),
        (Some(driver), gpus) => finding(Severity::Ok, format!("{driver}, {gpus} GPUs")),
        (None, _) => finding(Severity::Note, "there is none".to_owned())
            .remedy("without a GPU: cuda-cluster up --topology dgx-h100 --simulate"),
    }
}
