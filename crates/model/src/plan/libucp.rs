//! Which libucp the processes load.
//!
//! Does not search for libraries; the caller's environment lists the installed ones.
//!
//! *Invariant:* unless the user names one, only workers with GPUs of this machine get another
//! libucp than the dynamic loader's, and only one with CUDA transports; if InfiniBand is requested,
//! one without its transports is chosen only with a note.

use std::collections::BTreeSet;

use super::context::InstalledUcx;
use super::engine::EnginePlan;
use super::form::{Plan, Rejected, Why};
use super::variables::{Situation, Variables};
use crate::spec::EngineKind;
use crate::topology::Note;

/// The environment variable with the path of the libucp that native workers open.
pub const LIBRARY_VARIABLE: &str = "CUDA_CLUSTER_UCX";
/// The directories that the dynamic loader searches first.
const LOADER: &str = "LD_LIBRARY_PATH";
/// Makes PyPI's `libucx` load the system's libucp instead of its own.
const PREFER_SYSTEM: &str = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY";

/// How long UCX waits at each function whose code it changes, for threads that are within its first
/// bytes (`ucm/bistro/bistro.c`).
const GRACE: &str = "UCX_MEM_BISTRO_GRACE_DURATION";

/// The key of the choice among a plan's reasons.
const CHOICE: &str = "ucx.library";

/// The paths of the libucp that a plan's processes load; empty if the dynamic loader finds it.
pub fn libucp_paths(plan: &Plan) -> BTreeSet<&str> {
    let workers = plan.workers.iter().map(|worker| (&worker.env, &worker.why));
    let scheduler = plan.scheduler.iter().map(|scheduler| (&scheduler.env, &scheduler.why));
    let told = scheduler.chain(workers).filter_map(|(env, why)| match plan.engine {
        EnginePlan::Native(_) => env.get(LIBRARY_VARIABLE),
        // The other engines find it through the loader's path, which may list several directories.
        _ => why.iter().find(|why| why.choice == CHOICE).map(|why| &why.chosen),
    });
    told.map(String::as_str).collect()
}

/// Adds the variables by which the processes find their libucp.
pub(super) fn choose(situation: &Situation<'_>, variables: &mut Variables) {
    let caller = situation.caller.variables.get(LIBRARY_VARIABLE);
    match (situation.spec.ucx.library.as_deref(), caller) {
        (Some("system"), _) => {}
        (Some("auto"), _) => automatic(situation, variables, true),
        (Some(path), _) => point_at(situation, variables, path, "asked for ('ucx.library')", &[]),
        (None, Some(path)) => {
            let reason = "set in the caller's environment";
            point_at(situation, variables, path, reason, &[]);
        }
        // This machine's libraries do not matter to a plan for another machine.
        (None, None) => {
            let here = situation.spec.topology.is_none() && situation.gpus;
            if here && situation.engine == EngineKind::Native {
                automatic(situation, variables, false);
            }
        }
    }
}

fn automatic(situation: &Situation<'_>, variables: &mut Variables, asked: bool) {
    let Some(installed) = &situation.caller.ucx_libraries else {
        let text = "which ones are installed is not known: the dynamic loader's is used";
        if asked {
            variables.notes.push(Note::new(CHOICE, text));
        }
        return;
    };
    let infiniband = situation.spec.ucx.infiniband == Some(true);
    let enough = |library: &&InstalledUcx| library.cuda && (library.verbs || !infiniband);
    let best = installed.iter().find(enough);
    let Some(best) = best.or_else(|| installed.iter().find(|library| library.cuda)) else {
        let text = "no libucp that knows CUDA is installed: the dynamic loader's is used";
        if asked || situation.gpus {
            variables.notes.push(Note::new(CHOICE, text));
        }
        return;
    };
    let why_not = |library: &InstalledUcx| match (library.cuda, library.verbs) {
        (false, _) => "does not know CUDA",
        (true, false) if infiniband && best.verbs => "does not know InfiniBand",
        (true, _) => "another comes first",
    };
    let others: Vec<Rejected> = installed
        .iter()
        .filter(|library| *library != best)
        .map(|library| Rejected { what: library.path.clone(), why: why_not(library).to_owned() })
        .collect();
    let knows = if infiniband && best.verbs { "CUDA and InfiniBand" } else { "CUDA" };
    let reason = format!("the first that knows {knows}: {}", best.whose);
    point_at(situation, variables, &best.path, &reason, &others);
}

/// The installed library that a path names: the file, its directory, or its installation.
fn named<'a>(situation: &Situation<'a>, path: &str) -> Option<&'a InstalledUcx> {
    let installed = situation.caller.ucx_libraries.as_deref().unwrap_or_default();
    installed.iter().find(|library| {
        let inside = library.path.strip_prefix(path.trim_end_matches('/'));
        inside.is_some_and(|rest| ["", "/libucp.so.0", "/lib/libucp.so.0"].contains(&rest))
    })
}

/// Notes that InfiniBand is requested but the libucp has no transports for it.
fn without_verbs(situation: &Situation<'_>, variables: &mut Variables, path: &str) {
    let lacks = named(situation, path).is_some_and(|library| !library.verbs);
    if situation.spec.ucx.infiniband == Some(true) && lacks {
        let installed = situation.caller.ucx_libraries.as_deref().unwrap_or_default();
        let others: Vec<&str> = installed
            .iter()
            .filter(|library| library.verbs && (library.cuda || !situation.gpus))
            .map(|library| library.path.as_str())
            .collect();
        let instead = match others.as_slice() {
            [] if situation.gpus => {
                "no installed libucp has both CUDA and InfiniBand; HPC-X's and conda-forge's 'ucx' \
                 do, PyPI's 'libucx' does not"
                    .to_owned()
            }
            [] => "HPC-X's, conda-forge's and most distributions' do".to_owned(),
            others => format!("{} does", others.join(" or ")),
        };
        let text = format!(
            "{path} has no transports for InfiniBand and RoCE (libuct_ib), which are asked for: \
             {instead}"
        );
        variables.notes.push(Note::new(CHOICE, text));
    }
}

fn point_at(
    situation: &Situation<'_>,
    variables: &mut Variables,
    path: &str,
    reason: &str,
    rejected: &[Rejected],
) {
    without_verbs(situation, variables, path);
    variables.why.push(Why {
        choice: CHOICE.to_owned(),
        chosen: path.to_owned(),
        reason: reason.to_owned(),
        rejected: rejected.to_vec(),
    });
    if situation.engine == EngineKind::Native {
        variables.env.insert(LIBRARY_VARIABLE.to_owned(), path.to_owned());
        if named(situation, path).is_some_and(|library| library.told_grace) {
            let reason = "UCX waits this long at each of some 24 functions that it changes as a \
                          worker starts; as UCX 1.20 did, instead of 50 ms";
            variables.set(GRACE, "5ms", reason);
        }
        return;
    }
    let places = match path.rsplit_once('/') {
        Some((directory, file)) if file.contains(".so") => directory.to_owned(),
        // Its directory, or that of the installation that it is in.
        _ => format!("{path}:{}/lib", path.trim_end_matches('/')),
    };
    let rest = situation.caller.variables.get(LOADER).map(|rest| format!(":{rest}"));
    let value = format!("{places}{}", rest.unwrap_or_default());
    variables.env.insert(LOADER.to_owned(), value);
    if situation.engine == EngineKind::Dask {
        variables.env.insert(PREFER_SYSTEM.to_owned(), "true".to_owned());
    }
}
