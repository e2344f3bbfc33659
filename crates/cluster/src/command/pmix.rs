//! PMIx for a job of the command engine: which libpmix serves, and what ranks must not inherit.
//!
//! The server is a process of its own (`os::pmix`).
//!
//! *Invariant:* ranks know no server but ours.

use std::path::Path;

use cuda_cluster_machine::os::pmix::{self, Job, Server, ServerError};
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::PMIX;
use cuda_cluster_model::plan::CommandPlan;

/// Open MPI 4 asks for PMIx only under a launcher that it knows by name, and takes ranks of others
/// for single processes. It knows IBM's by this variable, does not read what it says, and leaves
/// the binding as it is (`orte/mca/schizo/jsm`).
pub(super) const KNOWN_LAUNCHER: (&str, &str) = ("JSM_JSRUN_PORT", "0");

/// Variables of Open MPI whose processes share memory by files: of 4.x, of 5.x, and of both.
pub(crate) const SHARED_MEMORY: [&str; 3] = [
    "OMPI_MCA_btl_vader_backing_directory",
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
];

/// Starts the server of a job whose ranks run these of its programs, by number.
pub(super) async fn start(
    job: &str,
    programs: Vec<u32>,
    told: &CommandPlan,
    paths: &Paths,
) -> Result<Server, ServerError> {
    // The first program's, of several: any libpmix can serve any of them.
    let first = told.programs.first().map(|program| program.name.as_str());
    let program = told.argv_of(first).first().map(String::as_str).unwrap_or_default();
    let path = std::env::var("PATH").unwrap_or_default();
    let environment = std::env::var_os("VIRTUAL_ENV").filter(|root| !root.is_empty());
    let libraries = pmix::libraries(program, &path, environment.as_deref().map(Path::new));
    let job = Job { name: job.to_owned(), programs, libraries, directory: paths.pmix() };
    Server::start(&job, &paths.log(PMIX)).await
}

/// The variables that another server of PMIx, or another Open MPI's launcher, has given this
/// process.
pub(super) fn of_another_launcher() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    // Elsewhere they are the user's own settings.
    let within = std::env::var_os("OMPI_COMM_WORLD_RANK").is_some();
    names.filter(|name| pmix::is_of_another(name) || (within && is_of_mpirun(name))).collect()
}

/// What `mpirun` of Open MPI 4 says to its ranks of itself.
fn is_of_mpirun(name: &str) -> bool {
    ["OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix"].iter().any(|begin| name.starts_with(begin))
}
