//! Which libucp the processes load.
//!
//! Does not look for any: what is installed comes with the caller's surroundings.
//!
//! *Invariant:* without a word from the user, only workers with GPUs of this machine get another
//! libucp than the dynamic loader's, and only one that knows CUDA.

use super::caller::InstalledUcx;
use super::ucx::{Situation, Variables};
use super::{EngineKind, Rejected, Why};
use crate::topology::Note;

/// Names the libucp that native workers open; `ucx::LIBRARY_VARIABLE` has the same value.
const OPENED: &str = "CUDA_CLUSTER_UCX";
/// Where the dynamic loader looks first.
const LOADER: &str = "LD_LIBRARY_PATH";
/// Keeps PyPI's `libucx` from loading its own libucp.
const PREFER_SYSTEM: &str = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY";

/// Adds the variables by which the processes find their libucp.
pub(super) fn choose(situation: &Situation<'_>, variables: &mut Variables) {
    let caller = situation.caller.variables.get(OPENED);
    match (situation.spec.ucx.library.as_deref(), caller) {
        (Some("system"), _) => {}
        (Some("auto"), _) => automatic(situation, variables, true),
        (Some(path), _) => point_at(situation, variables, path, "asked for ('ucx.library')", &[]),
        (None, Some(path)) => {
            let reason = "set in the caller's environment";
            point_at(situation, variables, path, reason, &[]);
        }
        // The libraries of this machine are nothing to another machine's plan.
        (None, None) => {
            let here = situation.spec.topology.is_none() && situation.gpus;
            if here && situation.engine == EngineKind::Native {
                automatic(situation, variables, false);
            }
        }
    }
}

fn automatic(situation: &Situation<'_>, variables: &mut Variables, asked: bool) {
    let installed = &situation.caller.ucx_libraries;
    let Some(best) = installed.iter().find(|library| library.cuda) else {
        let text = "no libucp that knows CUDA is installed: the dynamic loader's is used";
        if asked || situation.gpus {
            variables.notes.push(Note::new("ucx.library", text));
        }
        return;
    };
    let others: Vec<Rejected> = installed
        .iter()
        .filter(|library| *library != best)
        .map(|InstalledUcx { path, cuda, .. }| Rejected {
            what: path.clone(),
            why: if *cuda { "another comes first" } else { "does not know CUDA" }.to_owned(),
        })
        .collect();
    let reason = format!("the first that knows CUDA: {}", best.whose);
    point_at(situation, variables, &best.path, &reason, &others);
}

fn point_at(
    situation: &Situation<'_>,
    variables: &mut Variables,
    path: &str,
    reason: &str,
    rejected: &[Rejected],
) {
    variables.why.push(Why {
        choice: "ucx.library".to_owned(),
        chosen: path.to_owned(),
        reason: reason.to_owned(),
        rejected: rejected.to_vec(),
    });
    if situation.engine == EngineKind::Native {
        variables.env.insert(OPENED.to_owned(), path.to_owned());
        return;
    }
    let directory = match path.rsplit_once('/') {
        Some((directory, file)) if file.contains(".so") => directory,
        _ => path,
    };
    let rest = situation.caller.variables.get(LOADER).map(|rest| format!(":{rest}"));
    let value = format!("{directory}{}", rest.unwrap_or_default());
    variables.env.insert(LOADER.to_owned(), value);
    if situation.engine == EngineKind::Dask {
        variables.env.insert(PREFER_SYSTEM.to_owned(), "true".to_owned());
    }
}
