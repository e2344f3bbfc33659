//! What is tried in this process: filters, a control group, the run directory; and a Python.
//!
//! *Invariant:* what is made for a check is removed by it.

use super::{Finding, Severity};
use crate::dask;
use cuda_cluster_data::ucx;
use cuda_cluster_machine::os::containment::Cgroup;
use cuda_cluster_machine::os::run_directory;
use cuda_cluster_machine::probe;
use cuda_cluster_model::plan::DaskPlan;
use cuda_cluster_model::text::in_full;

/// What other users can do to processes that use UCX's shared memory.
pub(super) fn other_users() -> Finding {
    match ucx::try_guarding_wakeups() {
        Ok(()) => Finding::tried(
            "other-users",
            Severity::Ok,
            "can wake processes that use UCX within this machine, which costs CPU time, but not \
             end them",
        ),
        Err(error) => {
            let text = format!(
                "can end processes that use UCX within this machine with an empty datagram: {error}"
            );
            Finding::tried("other-users", Severity::Warning, text)
        }
    }
}

pub(super) fn containment() -> Finding {
    match Cgroup::create(&format!("doctor-{}", std::process::id())) {
        Ok(group) => {
            group.remove();
            Finding::tried("containment", Severity::Ok, "a control group with cgroup.kill")
        }
        Err(error) => Finding::tried(
            "containment",
            Severity::Ok,
            format!("process groups and a subreaper (no control group: {error})"),
        ),
    }
}

pub(super) fn run_directories() -> Finding {
    let base = run_directory::base();
    let names = match run_directory::names() {
        Ok(names) => names,
        Err(error) => {
            let finding = Finding::tried("run-directories", Severity::Error, in_full(&error));
            return error.hint().into_iter().fold(finding, Finding::remedy);
        }
    };
    let dead = names.iter().filter(|name| !run_directory::Paths::of(name).is_alive()).count();
    let clusters = match names.len() {
        0 => "no cluster".to_owned(),
        1 => "1 cluster".to_owned(),
        count => format!("{count} clusters"),
    };
    let ended = if dead > 0 { format!(", {dead} of them ended") } else { String::new() };
    let text = format!("{} ({clusters}{ended})", base.display());
    Finding::tried("run-directories", Severity::Ok, text)
}

/// The Python that Dask's processes would run in; without it another engine still starts.
pub(super) async fn python(needed: Option<&DaskPlan>) -> Finding {
    let bad = if needed.is_some() { Severity::Error } else { Severity::Note };
    let own = probe::own_environment();
    let asked = needed.and_then(|dask| dask.python.as_deref());
    let found = match dask::find(asked, own.as_deref(), |name| std::env::var_os(name)) {
        Ok(found) => found,
        Err(error) => {
            let finding = Finding::tried("python", bad, error.to_string());
            return error.hint().into_iter().fold(finding, Finding::remedy);
        }
    };
    let place = format!("{} ({})", found.path.display(), found.reason);
    match dask::inspect(&found.path).await {
        Ok(inspection) => {
            let version = |name: &str| inspection.packages.get(name).cloned();
            match version("distributed") {
                Some(distributed) => Finding::tried(
                    "python",
                    Severity::Ok,
                    format!("{} with distributed {distributed}, {place}", inspection.version),
                ),
                None => Finding::tried(
                    "python",
                    bad,
                    format!("{} has no distributed, {place}", inspection.version),
                ),
            }
        }
        Err(error) => {
            let finding = Finding::tried("python", bad, format!("{error}, {place}"));
            error.hint().into_iter().fold(finding, Finding::remedy)
        }
    }
}
