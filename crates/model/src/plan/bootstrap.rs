//! How ranks of the command engine learn of each other: in whose languages they are told.
//!
//! Decides which are offered, what they are for, and the threads of a rank. The values that only a
//! start knows (ports, sockets, tokens) are `cluster::command`'s.
//!
//! *Invariant:* nothing is set that the user has set.

use std::collections::BTreeMap;

use super::context::Context;
use super::cpus;
use super::form::{Why, WorkerPlan};
use super::shares::Share;
use crate::cpuset::CpuSet;
use crate::spec::{Bootstrap, EngineKind};

/// The variable that says how many threads a rank's libraries start.
const OMP: &str = "OMP_NUM_THREADS";
/// How the reason begins that this module gives for [`OMP`].
const ITS_SHARE: &str = "its share of";

/// The languages that are offered, each once, in the order of the documentation.
pub(super) fn offered(context: &Context<'_>) -> Vec<Bootstrap> {
    let asked = context.spec.command.bootstrap.as_deref();
    let asked = asked.unwrap_or(&Bootstrap::USUAL);
    Bootstrap::ALL.into_iter().filter(|one| asked.contains(one)).collect()
}

/// What a rank is told, and for whom, as far as the plan knows it.
pub(super) fn of_rank(
    context: &Context<'_>,
    at: usize,
    shares: &[Share],
) -> (BTreeMap<String, String>, Vec<Why>) {
    let mut env = BTreeMap::new();
    if context.engine != EngineKind::Command {
        return (env, Vec::new());
    }
    let offered = offered(context);
    let mut why: Vec<Why> = offered.iter().map(|one| told(*one)).collect();
    let mut own =
        context.spec.worker.env.iter().flatten().chain(context.slots[at].overriding_env());
    let free = !context.caller.variables.contains_key(OMP) && own.all(|(name, _)| name != OMP);
    if let Some((threads, cores, ranks)) =
        threads(context, at, shares).filter(|_| free && offered.contains(&Bootstrap::Threads))
    {
        let reason = format!(
            "{ITS_SHARE} {cores} cores that {ranks} of the ranks are bound to; torchrun says 1"
        );
        why.push(Why::new(format!("env.{OMP}"), threads.to_string(), reason));
        env.insert(OMP.to_owned(), threads.to_string());
    }
    (env, why)
}

/// A rank's threads, of how many cores, which how many ranks share; `None` if it is not bound.
fn threads(context: &Context<'_>, at: usize, shares: &[Share]) -> Option<(usize, usize, usize)> {
    let mine = shares[at].0.as_ref()?;
    let cores = cpus::cores(context.topology, mine).len();
    let with = |other: &&Share| {
        other.0.as_ref().is_some_and(|other: &CpuSet| !other.intersection(mine).is_empty())
    };
    let ranks = shares.iter().filter(with).count().max(1);
    (cores > 0).then(|| ((cores / ranks).max(1), cores, ranks))
}

/// Lowers the threads that this module has chosen to the ranks' shares of the CPUs that they really
/// get.
pub(super) fn fit(workers: &mut [WorkerPlan]) {
    let bound: Vec<CpuSet> = workers.iter().filter_map(|one| one.binding.cpus.clone()).collect();
    let chosen =
        |why: &Why| why.choice == format!("env.{OMP}") && why.reason.starts_with(ITS_SHARE);
    for worker in workers.iter_mut().filter(|worker| worker.why.iter().any(chosen)) {
        let Some(mine) = &worker.binding.cpus else { continue };
        let ranks = bound.iter().filter(|other| !other.intersection(mine).is_empty()).count();
        if let Some(threads) = worker.env.get_mut(OMP) {
            let planned = threads.parse().unwrap_or(1).max(1);
            *threads = (mine.len() / ranks.max(1)).clamp(1, planned).to_string();
        }
    }
}

/// What a language's variables are, and for whom.
fn told(language: Bootstrap) -> Why {
    let (variables, reason) = match language {
        Bootstrap::Torch => (
            "GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_*",
            "what torchrun sets beside RANK and MASTER_ADDR: Lightning, unsloth and others look for \
             it; the error file of a rank becomes the cause that is shown",
        ),
        Bootstrap::Threads => (
            OMP,
            "without it each rank starts a thread for every CPU that it may use, and ranks share CPUs",
        ),
        Bootstrap::Nccl => (
            "NCCL_RAS_ADDR",
            "an address of this job's own: two jobs of a machine can't share NCCL's usual one",
        ),
        Bootstrap::Jax => (
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK \
             OMPI_MCA_orte_hnp_uri JAX_COORDINATOR_PORT",
            "jax.distributed.initialize() without arguments finds the ranks by Open MPI's variables",
        ),
        Bootstrap::Mpi => (
            "PMI_FD PMI_RANK PMI_SIZE",
            "PMI-1 and PMI-2, by a connection that is open when a rank begins: MPICH, Intel MPI, \
             MVAPICH, NVSHMEM",
        ),
        Bootstrap::Rrun => (
            "RRUN_RANK RRUN_NRANKS RRUN_SOCKET_ADDR RRUN_SOCKET_TOKEN",
            "RapidsMPF and cudf-polars, which run as one rank each without them",
        ),
        Bootstrap::Pmix => (
            "PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_* JSM_JSRUN_PORT",
            "PMIx, by a server of the libpmix that is installed: Open MPI, and NVSHMEM by it",
        ),
    };
    Why::new(format!("bootstrap.{language}"), variables, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{CallerEnvironment, Here, adapt_to_here, plan};
    use crate::spec::Request;
    use crate::topology::{builtin, parse};

    /// A rank's threads as planned for a DGX H100, and as simulated on a machine of two CPUs.
    fn threads(spec: serde_json::Value, caller: &CallerEnvironment) -> [Option<String>; 2] {
        let machine = parse(builtin("dgx-h100").expect("built in")).expect("right");
        let spec = serde_json::from_value(spec).expect("a spec");
        let request = Request::of(spec).expect("no contradictions");
        let plan = plan(&machine, &request, caller).expect("a plan");
        let here = Here { cpus: [0, 1].into_iter().collect(), ..Here::default() };
        let (adapted, _) = adapt_to_here(&plan, &here);
        [&plan, &adapted].map(|plan| plan.workers[0].env.get(OMP).cloned())
    }

    #[test]
    fn ranks_share_their_cores_and_what_the_user_has_set_stays() {
        let of = |number: &str| Some(number.to_owned());
        let (engine, nobody) = ("command", CallerEnvironment::default());
        let plain = serde_json::json!({ "engine": engine });
        assert_eq!(threads(plain.clone(), &nobody), [of("14"), of("1")]);
        let set = serde_json::json!({ "engine": engine, "worker": { "env": { OMP: "8" } } });
        assert_eq!(threads(set, &nobody), [of("8"), of("8")]);
        let own = [serde_json::json!({ "match": { "worker": "gpu0" }, "env": { OMP: "5" } })];
        let set = serde_json::json!({ "engine": engine, "overrides": own });
        assert_eq!(threads(set, &nobody), [of("5"), of("5")]);
        let mut caller = CallerEnvironment::default();
        caller.variables.insert(OMP.to_owned(), "3".to_owned());
        assert_eq!(threads(plain, &caller), [None, None], "it is inherited");
    }
}
