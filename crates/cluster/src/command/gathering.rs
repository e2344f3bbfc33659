//! Which of the processes that a batch system has started, one on each machine, this one is: the
//! first has the scheduler of their common Dask cluster, and the others join it.
//!
//! Starts nothing and waits for nobody.
//!
//! *Invariant:* a process that can't know that others are like it is told so, and none of two is
//! the first.

use super::launcher::tasks_of_node;

/// A process among those that bring up one Dask cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathering {
    /// Its number; 0 has the scheduler.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    /// A name of the job that no other has at that time, of letters, digits and hyphens; `None` if
    /// its launcher tells none.
    pub job: Option<String>,
}

/// Why it is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum GatheringError {
    /// No launcher's variable is set.
    #[error("nothing says which of several processes this is")]
    Nobody,
    /// It runs within a job, but not as one of its tasks.
    #[error("this is not a task of the job, but its script")]
    Script,
    /// Several would share the GPUs.
    #[error("this is one of {here} tasks of this machine, which would share its GPUs")]
    Several { here: u32 },
    /// A variable has no number.
    #[error("{variable}={value:?} is no number")]
    Odd { variable: &'static str, value: String },
}

impl GatheringError {
    /// What the user can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Nobody => {
                "start it with srun, mpiexec, flux run or pbsdsh, one task on each machine; or name \
                 the scheduler's address or its file in 'dask.join'"
            }
            Self::Script => {
                "write srun before it: srun --ntasks-per-node=1 cuda-cluster up --join auto"
            }
            Self::Several { .. } => "start one task on each machine (--ntasks-per-node=1, -ppn 1)",
            Self::Odd { .. } => "name the scheduler's address or its file in 'dask.join'",
        }
    }
}

/// A launcher's variables: the number of a task, of all, of those here (empty: it does not say),
/// and the job's name.
struct Launcher {
    rank: &'static str,
    size: &'static [&'static str],
    here: &'static str,
    job: &'static [&'static str],
}

/// Slurm's come first: its `srun` may start MPI's processes, which have others, too.
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        here: "",
        job: &["SLURM_JOB_ID"],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        here: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "PBS_JOBID"],
    },
    Launcher {
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        here: "MPI_LOCALNRANKS",
        job: &["PBS_JOBID", "PMI_JOBID", "LSB_JOBID"],
    },
    Launcher { rank: "FLUX_TASK_RANK", size: &["FLUX_JOB_SIZE"], here: "", job: &["FLUX_JOB_ID"] },
    Launcher {
        rank: "PALS_RANKID",
        size: &["PMI_SIZE", "PALS_SIZE"],
        here: "PALS_LOCAL_SIZE",
        job: &["PALS_APID", "PBS_JOBID"],
    },
    // pbsdsh starts one on each node, and tells no number of them.
    Launcher { rank: "PBS_VNODENUM", size: &[], here: "", job: &["PBS_JOBID"] },
];

/// Which process this is, from its environment.
///
/// # Errors
/// If no launcher says so, or it has started several here.
pub fn gathering(variable: impl Fn(&str) -> Option<String>) -> Result<Gathering, GatheringError> {
    let of = |name: &str| variable(name).filter(|value| !value.is_empty());
    let Some(launcher) = LAUNCHERS.iter().find(|launcher| of(launcher.rank).is_some()) else {
        return Err(GatheringError::Nobody);
    };
    // The batch script itself has the variables of a first task.
    if launcher.rank == "SLURM_PROCID" && of("SLURM_STEP_ID").is_none() {
        return Err(GatheringError::Script);
    }
    let number = |name: &'static str| match of(name) {
        None => Ok(None),
        Some(value) => match value.trim().parse::<u32>() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(GatheringError::Odd { variable: name, value }),
        },
    };
    let rank = number(launcher.rank)?.unwrap_or(0);
    let size = match launcher.size.iter().find(|name| of(name).is_some()) {
        Some(name) => number(name)?,
        None => None,
    };
    let here = match launcher.here {
        "" => slurms_tasks_here(&of),
        name => number(name)?,
    };
    if let Some(here) = here.filter(|here| *here > 1) {
        return Err(GatheringError::Several { here });
    }
    // Steps of a job are jobs of their own here; so is a job that starts again, because a host that
    // has lost its power has left the file at which the job met before.
    let of_slurm = |name| of(name).filter(|_| launcher.rank == "SLURM_PROCID");
    let step = of_slurm("SLURM_STEP_ID").map_or_else(String::new, |step| format!("-{step}"));
    let again = of_slurm("SLURM_RESTART_COUNT").filter(|count| count != "0");
    let again = again.map_or_else(String::new, |count| format!("-again{count}"));
    let job = launcher.job.iter().find_map(|name| of(name));
    let job = job.map(|job| plain(&format!("{job}{step}{again}")));
    Ok(Gathering { rank, size: size.unwrap_or(rank + 1), job })
}

/// How many tasks Slurm has started on this machine: `4(x2),3` says so of each node.
fn slurms_tasks_here(of: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let list = of("SLURM_STEP_TASKS_PER_NODE")?;
    let node: usize = of("SLURM_NODEID")?.parse().ok()?;
    tasks_of_node(&list, node)
}

/// With hyphens for all but letters and digits.
fn plain(text: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let text: String = text.chars().map(safe).collect();
    text.trim_matches('-').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(around: &[(&str, &str)]) -> Result<Gathering, GatheringError> {
        gathering(|name| Some(around.iter().find(|(other, _)| *other == name)?.1.to_owned()))
    }

    fn known(rank: u32, size: u32, job: &str) -> Result<Gathering, GatheringError> {
        Ok(Gathering { rank, size, job: Some(job.to_owned()) })
    }

    #[test]
    fn the_tasks_of_a_step_are_numbered() {
        let srun = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x3)"),
            ("SLURM_NODEID", "1"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("PMI_RANK", "5"),
        ];
        assert_eq!(of(&srun), known(1, 3, "77-0"));
        for (count, job) in [("0", "77-0"), ("2", "77-0-again2")] {
            let started = [&srun[..], &[("SLURM_RESTART_COUNT", count)]].concat();
            assert_eq!(of(&started), known(1, 3, job));
        }
        let mut several = srun;
        several[2].1 = "2(x3)";
        assert_eq!(of(&several), Err(GatheringError::Several { here: 2 }));
        assert_eq!(of(&srun[..5]), Err(GatheringError::Script));
        let mut odd = srun;
        odd[0].1 = "first";
        assert!(matches!(of(&odd), Err(GatheringError::Odd { variable: "SLURM_PROCID", .. })));
    }

    #[test]
    fn other_launchers_are_understood() {
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", "prterun-a.b-7@1"),
        ];
        assert_eq!(of(&ompi), known(0, 2, "prterun-a-b-7-1"));
        let flux = [("FLUX_TASK_RANK", "3"), ("FLUX_JOB_SIZE", "4"), ("FLUX_JOB_ID", "ƒ9")];
        assert_eq!(of(&flux), known(3, 4, "9"));
        let pbsdsh = [("PBS_VNODENUM", "2"), ("PBS_JOBID", "12.server")];
        assert_eq!(of(&pbsdsh), known(2, 3, "12-server"));
        let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "1")];
        assert_eq!(of(&hydra), Ok(Gathering { rank: 1, size: 2, job: None }));
        assert_eq!(of(&[]), Err(GatheringError::Nobody));
    }
}
