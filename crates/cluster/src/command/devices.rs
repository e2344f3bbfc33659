//! Which GPUs the ranks of a start see, when they are not all that were planned.
//!
//! *Invariant:* a rank that finds its GPU by `LOCAL_RANK` finds the one that it is bound to.

use std::collections::BTreeMap;

use cuda_cluster_model::plan::{VISIBLE, WorkerPlan};

/// Shows the rank of `own` the GPUs of the `members` of its start, in their order. All that are
/// `planned` see the same list, or each its own GPU first.
pub(crate) fn show(
    planned: &[WorkerPlan],
    members: &[&WorkerPlan],
    own: &WorkerPlan,
    env: &mut BTreeMap<String, String>,
) {
    let list = |worker: &WorkerPlan| -> Vec<String> {
        let names = worker.env.get(VISIBLE).map(String::as_str).unwrap_or_default();
        names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let mine = list(own);
    if mine.len() < 2 {
        return;
    }
    let by_number = planned.len() == mine.len() && planned.iter().all(|one| list(one) == mine);
    let device = |worker: &WorkerPlan| {
        let names = list(worker);
        let at = if by_number { worker.rank as usize } else { 0 };
        names.get(at).cloned()
    };
    let theirs: Vec<String> = members.iter().filter_map(|member| device(member)).collect();
    let seen: Vec<String> = match by_number {
        true => theirs,
        false => mine.into_iter().filter(|name| theirs.contains(name)).collect(),
    };
    env.insert(VISIBLE.to_owned(), seen.join(","));
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::plan;
    use cuda_cluster_model::spec::Request;
    use cuda_cluster_model::topology::{builtin, parse};

    /// What each member sees.
    fn seen(spec: serde_json::Value, members: &[usize]) -> Vec<String> {
        let machine = parse(builtin("dgx-h100").expect("built in")).expect("right");
        let request = Request::of(serde_json::from_value(spec).expect("a spec")).expect("sound");
        let workers = plan(&machine, &request, &Default::default()).expect("a plan").workers;
        let members: Vec<&WorkerPlan> = members.iter().map(|at| &workers[*at]).collect();
        let see = |own: &&WorkerPlan| {
            let mut env = own.env.clone();
            show(&workers, &members, own, &mut env);
            env[VISIBLE].clone()
        };
        members.iter().map(see).collect()
    }

    #[test]
    fn a_ranks_number_is_that_of_its_device_whoever_takes_part() {
        let all = serde_json::json!({ "engine": "command", "workers": 4 });
        assert_eq!(seen(all.clone(), &[0, 1, 2, 3]), ["0,1,2,3"; 4]);
        assert_eq!(seen(all.clone(), &[0, 3, 2]), ["0,3,2"; 3], "gpu3 has taken rank 1");
        assert_eq!(seen(all, &[2]), ["2"]);
        let rotated = serde_json::json!({
            "engine": "command", "workers": 3, "command": { "visible_devices": "rotated" },
        });
        assert_eq!(seen(rotated, &[0, 2]), ["0,2", "2,0"]);
        let own = serde_json::json!({
            "engine": "command", "workers": 3, "command": { "visible_devices": "own" },
        });
        assert_eq!(seen(own, &[0, 2]), ["0", "2"]);
        let shared = serde_json::json!({
            "engine": "command", "workers": 2, "workers_per_gpu": 2,
        });
        assert_eq!(seen(shared, &[0, 1, 2]), ["0,1", "0,1", "1,0"]);
    }
}
