//! What each rank of a start is told: its number, and where it finds the others, in the languages
//! that the plan offers.
//!
//! *Invariant:* what the user has set stays; who this rank is, is ours to say.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, TcpListener};

use super::crew::Role;
use super::pmix;
use super::rendezvous::{self, Rendezvous};
use cuda_cluster_machine::os::pmix::{Server, ServerError};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::RANKS;
use cuda_cluster_model::plan::{CommandPlan, Program};
use cuda_cluster_model::spec::Bootstrap;
use cuda_cluster_wire::secret::Secret;

/// Variables that users set themselves.
const SETTINGS: [&str; 5] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_RAS_ADDR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "JAX_COORDINATOR_PORT",
];

/// What an outer launcher has said of this process in the language that MPI's libraries refuse
/// beside the one that ranks are told.
const OUTER: [&str; 2] = ["PMIX_NAMESPACE", "PMIX_RANK"];

/// How the ranks of one start find each other.
#[derive(Debug)]
pub(crate) struct Meeting {
    job: String,
    /// What each rank is among those that run the same program.
    roles: Vec<Role>,
    /// How often the ranks have been started again, and how often they may be.
    restarts: [u32; 2],
    /// Free ports of loopback: rank 0's, JAX's coordinator's, NCCL's status.
    ports: [u16; 3],
    /// What the caller has set already of [`SETTINGS`].
    kept: Vec<&'static str>,
    /// Those of the run directory, in which ranks of PyTorch say why they fail.
    paths: Paths,
    rendezvous: Option<rendezvous::Told>,
    /// Each rank's variables of PMIx.
    pmix: Vec<BTreeMap<String, String>>,
}

/// Who answers the ranks of one start.
#[derive(Debug)]
pub(crate) struct Hosts {
    rendezvous: Option<Rendezvous>,
    pmix: Option<Server>,
}

/// Why ranks have no place to find each other.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeetingError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Pmix(#[from] ServerError),
    #[error("no rank of the program {0} is left")]
    NobodyLeft(String),
}

impl Meeting {
    /// Prepares a start of ranks with these roles, after `restart` others; also returns who is to
    /// serve them, if a language needs it. `start` is a name that no other start has ever had:
    /// MPICH names shared memory by it, which killed ranks leave behind.
    ///
    /// The ports are released before this returns, as with `torchrun`: rank 0 binds its own.
    ///
    /// # Errors
    /// If the system has no free port, the socket can't be made, or no libpmix serves.
    pub(crate) async fn prepare(
        [job, start]: [&str; 2],
        roles: Vec<Role>,
        told: &CommandPlan,
        restart: u32,
        paths: &Paths,
        token: Secret,
    ) -> Result<(Self, Hosts), MeetingError> {
        let programs = || roles.iter().map(|role| role.program).collect();
        let serves =
            [Bootstrap::Mpi, Bootstrap::Rrun].iter().any(|one| told.bootstrap.contains(one));
        let rendezvous = match serves {
            true => Some(Rendezvous::open(&paths.socket(RANKS), start, programs(), token).await?),
            false => None,
        };
        let pmix = match told.bootstrap.contains(&Bootstrap::Pmix) {
            true => Some(pmix::start(start, programs(), told, paths).await?),
            false => None,
        };
        // Within a rank of another launcher these are that job's.
        let within = std::env::var_os("RANK").is_some();
        let kept = SETTINGS
            .into_iter()
            .filter(|_| !within)
            .filter(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
        let meeting = Self {
            job: job.to_owned(),
            roles,
            restarts: [restart, told.restarts],
            ports: free_ports()?,
            kept: kept.collect(),
            paths: paths.clone(),
            rendezvous: rendezvous.as_ref().map(|one| one.told().clone()),
            pmix: pmix.as_ref().map(|server| server.variables.clone()).unwrap_or_default(),
        };
        Ok((meeting, Hosts { rendezvous, pmix }))
    }

    fn ranks(&self) -> u32 {
        u32::try_from(self.roles.len()).unwrap_or(u32::MAX)
    }

    /// Adds what a rank is told to its program.
    pub(crate) fn tell(&self, rank: u32, languages: &[Bootstrap], program: &mut Program) {
        let [master, ..] = self.ports;
        let mut who = self.torchrun(rank);
        let mut settings = vec![
            ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
            ("MASTER_PORT", master.to_string()),
        ];
        for language in languages {
            match language {
                Bootstrap::Torch => {
                    who.extend(self.torchelastic(rank));
                    settings.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".to_owned()));
                }
                // In the plan.
                Bootstrap::Threads => {}
                Bootstrap::Nccl => settings.push(("NCCL_RAS_ADDR", self.nccl())),
                Bootstrap::Jax => {
                    who.extend(self.jax(rank));
                    settings.push(("JAX_COORDINATOR_PORT", self.ports[1].to_string()));
                }
                Bootstrap::Mpi => {
                    who.extend(self.mpi(rank));
                    let told = self.rendezvous.iter().map(|told| told.connections(rank));
                    program.connections.extend(told.flatten());
                    program.without = OUTER.map(str::to_owned).to_vec();
                }
                Bootstrap::Pmix => {
                    program.without = pmix::of_another_launcher();
                    let (name, value) = pmix::KNOWN_LAUNCHER;
                    who.push((name, value.to_owned()));
                    let variables = self.pmix.get(rank as usize);
                    program.env.extend(variables.cloned().unwrap_or_default());
                }
                Bootstrap::Rrun => {
                    who.extend(self.rendezvous.iter().flat_map(|told| told.rrun(rank)));
                }
            }
        }
        for (name, value) in who {
            program.env.insert(name.to_owned(), value);
        }
        for (name, value) in settings {
            if !self.kept.contains(&name) {
                program.env.entry(name.to_owned()).or_insert(value);
            }
        }
    }

    fn torchrun(&self, rank: u32) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", self.ranks().to_string()),
            ("LOCAL_WORLD_SIZE", self.ranks().to_string()),
        ]
    }

    /// What torchrun's agent adds. Rank 0 serves the store, because there is no agent that does.
    fn torchelastic(&self, rank: u32) -> Vec<(&'static str, String)> {
        let name = |what: &str| what.to_owned();
        let role = self.roles.get(rank as usize);
        vec![
            ("GROUP_RANK", name("0")),
            ("GROUP_WORLD_SIZE", name("1")),
            (
                "ROLE_NAME",
                role.and_then(|role| role.name.clone()).unwrap_or_else(|| name("default")),
            ),
            ("ROLE_RANK", role.map_or(rank, |role| role.rank).to_string()),
            ("ROLE_WORLD_SIZE", role.map_or(self.ranks(), |role| role.size).to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts[0].to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.restarts[1].to_string()),
            ("TORCHELASTIC_RUN_ID", self.job.clone()),
            ("TORCHELASTIC_USE_AGENT_STORE", name("False")),
            ("TORCHELASTIC_ERROR_FILE", self.paths.rank_error(rank).display().to_string()),
        ]
    }

    fn nccl(&self) -> String {
        format!("{}:{}", Ipv4Addr::LOCALHOST, self.ports[2])
    }

    /// JAX takes the address from the one at which Open MPI's processes find their launcher.
    fn jax(&self, rank: u32) -> Vec<(&'static str, String)> {
        let (host, port) = (Ipv4Addr::LOCALHOST, self.ports[1]);
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", self.ranks().to_string()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", self.ranks().to_string()),
            ("OMPI_MCA_orte_hnp_uri", format!("0.0;tcp://{host}:{port}")),
        ]
    }

    fn mpi(&self, rank: u32) -> Vec<(&'static str, String)> {
        vec![
            ("PMI_RANK", rank.to_string()),
            ("PMI_SIZE", self.ranks().to_string()),
            ("MPI_LOCALRANKID", rank.to_string()),
            ("MPI_LOCALNRANKS", self.ranks().to_string()),
        ]
    }
}

/// Ports of loopback that are free now, all different.
fn free_ports() -> io::Result<[u16; 3]> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let held = [bind()?, bind()?, bind()?];
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(&held) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

impl Hosts {
    /// Serves the ranks, until this is dropped. `lost` is told when ranks can't go on.
    pub(crate) async fn serve(self, lost: impl Fn(String)) {
        let Self { rendezvous, pmix } = self;
        let answered = async {
            match rendezvous {
                Some(rendezvous) => rendezvous.serve().await,
                None => std::future::pending().await,
            }
        };
        let ended = async {
            match pmix {
                Some(mut server) => server.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(answered);
        tokio::select! {
            () = &mut answered => {}
            how = ended => {
                lost(format!("the server of PMIx {how}, and its ranks can't go on"));
                answered.await;
            }
        }
    }
}
