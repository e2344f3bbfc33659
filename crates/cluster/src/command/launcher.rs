//! What an outer launcher tells the processes that `exec` starts, under torchrun's names.
//!
//! Knows Slurm, Open MPI, MPICH's hydra, Flux and PALS (PBS on Cray). What a launcher does not say
//! is left out, and whatever the caller has set stays. Only Slurm names a host and a port that all
//! ranks agree on; others do if all ranks are on this machine: then the address is loopback's, and
//! the port follows from the process that has started them all.
//!
//! *Invariant:* a variable that is already set is never changed, except by an explicit local rank.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use cuda_cluster_model::spec::Bootstrap;

/// Ports for rank 0 under launchers that reserve none unless asked to (`--resv-ports`): all ranks
/// must arrive at the same port independently, and two jobs on a machine at different ones.
const PORTS: std::ops::Range<u64> = 20_000..30_000;

/// Ports for the status of NCCL, of which each machine of a job has its own.
const STATUS_PORTS: std::ops::Range<u64> = 30_000..32_000;

/// A launcher's names for a rank, the number of ranks, and both on its machine.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    /// Empty if it does not say.
    local_size: &'static str,
}

/// Launchers other than Slurm, as their processes' environments have it.
const LAUNCHERS: [Names; 4] = [
    // Open MPI.
    Names {
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    // hydra: MPICH's and Intel MPI's mpiexec.
    Names {
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    },
    // flux-environment(7); the number here follows where there is one node.
    Names {
        rank: "FLUX_TASK_RANK",
        size: "FLUX_JOB_SIZE",
        local_rank: "FLUX_TASK_LOCAL_ID",
        local_size: "",
    },
    // PALS itself tells no size; Cray's PMI does.
    Names {
        rank: "PALS_RANKID",
        size: "PMI_SIZE",
        local_rank: "PALS_LOCAL_RANKID",
        local_size: "PALS_LOCAL_SIZE",
    },
];

/// The variables for a process of this local rank: `LOCAL_RANK`, and, as far as the launcher
/// provides them, `RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
///
/// `given` means that the user chose the rank, which may therefore differ from the launcher's.
/// `starter` is the process that has started all ranks of this machine. Of the `languages` those
/// are spoken that need nobody who answers.
pub fn told_by_launcher(
    local_rank: u32,
    given: bool,
    starter: u32,
    languages: &[Bootstrap],
    variable: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    let of = |name: &str| variable(name).filter(|value| !value.is_empty());
    let is_ours =
        |name: &str| !given && of(name).and_then(|rank| rank.parse().ok()) == Some(local_rank);
    let mut found = match LAUNCHERS.iter().find(|names| is_ours(names.local_rank)) {
        _ if is_ours("SLURM_LOCALID") => slurm(&of),
        Some(names) => other(names, starter, &of),
        None => Vec::new(),
    };
    if !found.is_empty() && languages.contains(&Bootstrap::Torch) {
        found.extend(torchelastic(&found, starter, &of));
    }
    if !found.is_empty() && languages.contains(&Bootstrap::Nccl) {
        let address = format!("{}:{}", Ipv4Addr::LOCALHOST, port_of(STATUS_PORTS, starter));
        found.push(("NCCL_RAS_ADDR", Some(address)));
    }
    let unset = found.into_iter().filter(|(name, _)| of(name).is_none());
    let mut env: BTreeMap<String, String> =
        unset.filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if given || of("LOCAL_RANK").is_none() {
        env.insert("LOCAL_RANK".to_owned(), local_rank.to_string());
    }
    env
}

/// What a launcher says; a place to meet only if all ranks are here.
fn other(
    names: &Names,
    starter: u32,
    of: &dyn Fn(&str) -> Option<String>,
) -> Vec<(&'static str, Option<String>)> {
    let size = of(names.size);
    let nodes_of_flux = of("FLUX_JOB_NNODES").filter(|_| names.local_size.is_empty());
    let local_size = match nodes_of_flux.as_deref() {
        Some("1") => size.clone(),
        _ => of(names.local_size),
    };
    let all_here = size.is_some() && size == local_size;
    let port = port_of(PORTS, starter);
    vec![
        ("RANK", of(names.rank)),
        ("WORLD_SIZE", size),
        ("LOCAL_WORLD_SIZE", local_size),
        ("MASTER_ADDR", all_here.then(|| Ipv4Addr::LOCALHOST.to_string())),
        ("MASTER_PORT", all_here.then(|| port.to_string())),
    ]
}

/// What torchrun's agent adds, from what is known already: machines with as many ranks each.
fn torchelastic(
    found: &[(&'static str, Option<String>)],
    starter: u32,
    of: &dyn Fn(&str) -> Option<String>,
) -> Vec<(&'static str, Option<String>)> {
    let number = |name: &str| -> Option<u32> {
        found.iter().find(|(found, _)| *found == name)?.1.as_deref()?.parse().ok()
    };
    let (Some(rank), Some(size)) = (number("RANK"), number("WORLD_SIZE")) else {
        return Vec::new();
    };
    let each = number("LOCAL_WORLD_SIZE").filter(|each| *each > 0);
    let node = of("SLURM_NODEID").or_else(|| Some((rank / each?).to_string()));
    let nodes = each.map(|each| size.div_ceil(each).to_string());
    let job = ["SLURM_JOB_ID", "FLUX_JOB_ID", "PBS_JOBID", "PMIX_NAMESPACE"];
    let job = job.iter().find_map(|name| of(name)).unwrap_or_else(|| starter.to_string());
    let said = |text: &str| Some(text.to_owned());
    vec![
        ("GROUP_RANK", node),
        ("GROUP_WORLD_SIZE", nodes),
        ("ROLE_NAME", said("default")),
        ("ROLE_RANK", Some(rank.to_string())),
        ("ROLE_WORLD_SIZE", Some(size.to_string())),
        ("TORCHELASTIC_RESTART_COUNT", said("0")),
        ("TORCHELASTIC_MAX_RESTARTS", said("0")),
        ("TORCHELASTIC_RUN_ID", Some(job)),
        // Rank 0 serves the store.
        ("TORCHELASTIC_USE_AGENT_STORE", said("False")),
    ]
}

/// A port that all children of a process find by themselves.
fn port_of(ports: std::ops::Range<u64>, starter: u32) -> u64 {
    ports.start + u64::from(starter) % (ports.end - ports.start)
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
pub(super) fn tasks_of_node(list: &str, node: usize) -> Option<u32> {
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
        told(rank, given, &[], around)
    }

    fn told(
        rank: u32,
        given: bool,
        languages: &[Bootstrap],
        around: &[(&str, &str)],
    ) -> BTreeMap<String, String> {
        told_by_launcher(rank, given, 71_234, languages, |name| {
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
    fn other_launchers_are_understood_and_ranks_of_one_machine_meet_there() {
        let of = |names: [&'static str; 4], nodes: &'static str, local: &'static str| {
            let [rank, size, local_rank, local_size] = names;
            let told = [(rank, "5"), (size, "8"), (local_rank, "1"), (local_size, local)];
            let told = [&told[..], &[("FLUX_JOB_NNODES", nodes)]].concat();
            variables(1, false, &told)
        };
        for Names { rank, size, local_rank, local_size } in LAUNCHERS {
            let names = [rank, size, local_rank, local_size];
            let here = of(names, "1", "8");
            assert_eq!((&*here["RANK"], &*here["WORLD_SIZE"]), ("5", "8"), "{rank}");
            assert_eq!((&*here["LOCAL_RANK"], &*here["LOCAL_WORLD_SIZE"]), ("1", "8"), "{rank}");
            assert_eq!((&*here["MASTER_ADDR"], &*here["MASTER_PORT"]), ("127.0.0.1", "21234"));
            let several = of(names, "2", "4");
            assert!(!several.contains_key("MASTER_ADDR"), "{rank}: {several:?}");
        }
    }

    #[test]
    fn torchruns_set_follows_from_what_the_launcher_says() {
        let env = told(1, false, &[Bootstrap::Torch, Bootstrap::Nccl], &SRUN);
        assert_eq!((&*env["GROUP_RANK"], &*env["TORCHELASTIC_RUN_ID"]), ("1", "123456"));
        assert_eq!((&*env["ROLE_RANK"], &*env["ROLE_WORLD_SIZE"]), ("9", "12"));
        assert_eq!(env["NCCL_RAS_ADDR"], "127.0.0.1:31234");
        let own = [&SRUN[..], &[("NCCL_RAS_ADDR", "localhost:1")]].concat();
        assert!(!told(1, false, &[Bootstrap::Nccl], &own).contains_key("NCCL_RAS_ADDR"));
        let nobody = told(1, false, &[Bootstrap::Torch], &[]);
        assert_eq!(nobody.len(), 1, "only its number: {nobody:?}");
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
