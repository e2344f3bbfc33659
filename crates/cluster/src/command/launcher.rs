//! What an outer launcher tells the processes that `exec` starts, under torchrun's names.
//!
//! Knows Slurm and Open MPI. If the launcher does not provide a value (Open MPI gives no address),
//! its variable is left out, and whatever the caller has set stays.
//!
//! *Invariant:* a variable that is already set is never changed, except by an explicit local rank.

use std::collections::BTreeMap;

/// Ports for rank 0 under Slurm, which reserves none unless asked to (`--resv-ports`): all ranks
/// must arrive at the same port independently, and two jobs on a machine at different ones.
const PORTS: std::ops::Range<u64> = 20_000..30_000;

/// The variables for a process of this local rank: `LOCAL_RANK`, and, as far as the launcher
/// provides them, `RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
///
/// `given` means that the user chose the rank, which may therefore differ from the launcher's.
pub fn told_by_launcher(
    local_rank: u32,
    given: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let of = |name: &str| variable(name).filter(|value| !value.is_empty());
    let is_ours =
        |name: &str| !given && of(name).and_then(|rank| rank.parse().ok()) == Some(local_rank);
    let mut found = Vec::new();
    if is_ours("SLURM_LOCALID") {
        found = slurm(&of);
    } else if is_ours("OMPI_COMM_WORLD_LOCAL_RANK") {
        found = vec![
            ("RANK", of("OMPI_COMM_WORLD_RANK")),
            ("WORLD_SIZE", of("OMPI_COMM_WORLD_SIZE")),
            ("LOCAL_WORLD_SIZE", of("OMPI_COMM_WORLD_LOCAL_SIZE")),
        ];
    }
    let unset = found.into_iter().filter(|(name, _)| of(name).is_none());
    let mut env: BTreeMap<String, String> =
        unset.filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if given || of("LOCAL_RANK").is_none() {
        env.insert("LOCAL_RANK".to_owned(), local_rank.to_string());
    }
    env
}

/// What `srun` sets; variables of the step take precedence over those of the job.
fn slurm(of: &dyn Fn(&str) -> Option<String>) -> Vec<(&'static str, Option<String>)> {
    let first = |names: &[&str]| names.iter().find_map(|name| of(name));
    let node: usize = of("SLURM_NODEID").and_then(|node| node.parse().ok()).unwrap_or(0);
    let tasks = first(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]);
    let here = tasks.and_then(|tasks| tasks_of_node(&tasks, node));
    let nodes = first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]);
    vec![
        ("RANK", of("SLURM_PROCID")),
        ("WORLD_SIZE", first(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"])),
        ("LOCAL_WORLD_SIZE", here.map(|tasks| tasks.to_string())),
        ("MASTER_ADDR", nodes.and_then(|nodes| first_host(&nodes))),
        ("MASTER_PORT", port(of).map(|port| port.to_string())),
    ]
}

/// The port for rank 0: the first that Slurm reserved for the step, otherwise derived from the job.
fn port(of: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let digits = |text: String| -> Option<u64> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok()
    };
    if let Some(reserved) = of("SLURM_STEP_RESV_PORTS").and_then(digits) {
        return Some(reserved);
    }
    let job = of("SLURM_JOB_ID").and_then(digits)?;
    let step = of("SLURM_STEP_ID").and_then(digits).unwrap_or(0);
    // Steps of a job follow each other closely, and the previous step's port may still be in use.
    let offset = job.wrapping_mul(16).wrapping_add(step) % (PORTS.end - PORTS.start);
    Some(PORTS.start + offset)
}

/// The number of tasks on a node, from Slurm's `4(x2),3`.
fn tasks_of_node(list: &str, node: usize) -> Option<u32> {
    let mut passed = 0usize;
    for part in list.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        passed = passed.checked_add(nodes)?;
        if node < passed {
            return tasks.parse().ok();
        }
    }
    None
}

/// The first host in Slurm's `gpu[07-09,12]-ib,login1`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return Some(host).filter(|host| !host.is_empty());
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        host.push_str(inside.split([',', '-']).next()?);
        rest = after;
    }
    host.push_str(rest);
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(rank: u32, given: bool, around: &[(&str, &str)]) -> BTreeMap<String, String> {
        told_by_launcher(rank, given, |name| {
            let value = around.iter().find(|(other, _)| *other == name)?.1;
            Some(value.to_owned())
        })
    }

    const SRUN: [(&str, &str); 8] = [
        ("SLURM_LOCALID", "1"),
        ("SLURM_PROCID", "9"),
        ("SLURM_STEP_NUM_TASKS", "12"),
        ("SLURM_STEP_TASKS_PER_NODE", "8,4"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_NODELIST", "gpu[07-08]"),
        ("SLURM_JOB_ID", "123456"),
        ("SLURM_STEP_ID", "2"),
    ];

    #[test]
    fn srun_is_understood() {
        let env = variables(1, false, &SRUN);
        let wanted = [
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "gpu07"),
            ("MASTER_PORT", "25298"),
            ("RANK", "9"),
            ("WORLD_SIZE", "12"),
        ];
        assert_eq!(env, wanted.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn what_is_set_already_stands() {
        let env = variables(1, false, &[&SRUN[..], &[("MASTER_ADDR", "10.0.0.1")]].concat());
        assert!(!env.contains_key("MASTER_ADDR"), "{env:?}");
        assert_eq!(env["RANK"], "9");
    }

    #[test]
    fn a_rank_of_the_users_own_is_not_slurms() {
        let env = variables(1, true, &[&SRUN[..], &[("LOCAL_RANK", "5")]].concat());
        assert_eq!(env, BTreeMap::from([("LOCAL_RANK".to_owned(), "1".to_owned())]));
    }

    #[test]
    fn node_lists_are_read_to_their_first_host() {
        for (list, host) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("gpu[007-011,20]", Some("gpu007")),
            ("rack[2,4]-gpu[1-3]-ib,x", Some("rack2-gpu1-ib")),
            ("gpu[1", None),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_counted_through_repetitions() {
        let each: Vec<Option<u32>> = (0..5).map(|node| tasks_of_node("4(x2),3,1", node)).collect();
        assert_eq!(each, [Some(4), Some(4), Some(3), Some(1), None]);
        assert_eq!(tasks_of_node("4(x", 0), None);
    }
}
