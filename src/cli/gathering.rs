//! `up --join auto`: one Dask cluster of all processes that a batch system has started, one on each
//! machine.
//!
//! *Invariant:* they meet at a file that is this job's alone, unless the user has named one.

use std::path::PathBuf;

use serde::Serialize;

use super::failure::{Exit, Failure};
use super::flags::keys::in_flags;
use super::output;
use crate::cluster::command::{Gathering, gathering};
use crate::spec::Request;

/// What `dask.join` says for it.
const AUTO: &str = "auto";

/// Which of the processes this one is, and where they meet.
#[derive(Debug, Serialize)]
pub(super) struct Place {
    /// 0 has the scheduler.
    rank: u32,
    /// How many there are.
    size: u32,
    /// The job's name, as far as the launcher tells one.
    job: Option<String>,
    /// The scheduler's file.
    file: String,
}

/// Has this process's request start the scheduler, or join it, if that is to follow from the
/// environment; then it returns what did.
///
/// The first `begins` by removing a file that an earlier job has left.
pub(super) fn settle(request: &mut Request, begins: bool) -> Result<Option<Place>, Failure> {
    if request.spec.dask.join.as_deref() != Some(AUTO) {
        return Ok(None);
    }
    let found = gathering(|name| std::env::var(name).ok());
    let Gathering { rank, size, job } = found.map_err(|error| {
        let hint = in_flags(error.hint().to_owned());
        Failure::new(Exit::Usage, error).hint(hint)
    })?;
    let spec = &mut request.spec;
    let place = match (spec.scheduler.file.take(), &job) {
        (Some(file), _) => PathBuf::from(file),
        (None, Some(job)) => {
            let here = std::env::current_dir().map_err(|error| Failure::new(Exit::Usage, error))?;
            here.join(format!("cuda-cluster-{job}.json"))
        }
        (None, None) => {
            let error = anyhow::anyhow!("the launcher names no job whose own file could be met at");
            let hint = "name a file that all machines share and no other job uses: \
                        --scheduler-file FILE";
            return Err(Failure::new(Exit::Usage, error).hint(hint));
        }
    };
    let file = place.display().to_string();
    if let (None, Some(job)) = (&spec.name, &job) {
        // Names have a limit, and a job's may be long.
        let job: String = job.chars().take(24).collect();
        spec.name = format!("job-{job}-{rank}").parse().ok();
    }
    if rank > 0 {
        spec.dask.join = Some(file.clone());
        return Ok(Some(Place { rank, size, job, file }));
    }
    spec.dask.join = None;
    spec.scheduler.file = Some(file.clone());
    if spec.scheduler.host.is_none() && spec.scheduler.interface.is_none() && size > 1 {
        let Some(interface) = default_interface() else {
            let error = anyhow::anyhow!("nothing says where the other machines reach this one");
            let hint = "name the network interface that connects them: --interface ib0";
            return Err(Failure::new(Exit::Usage, error).hint(hint));
        };
        output::note(&format!(
            "the scheduler listens on {interface}, which leads to other networks; \
             --interface names another one"
        ));
        spec.scheduler.interface = Some(interface);
    }
    if begins
        && let Err(error) = std::fs::remove_file(&place)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        let error = anyhow::Error::new(error).context(format!("cannot replace {file}"));
        return Err(Failure::new(Exit::Usage, error));
    }
    Ok(Some(Place { rank, size, job, file }))
}

/// The interface of the default route over IPv4.
pub(super) fn default_interface() -> Option<String> {
    let routes = std::fs::read_to_string("/proc/net/route").ok()?;
    let words = |line: &str| -> Option<(String, String)> {
        let mut words = line.split_ascii_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    let mut routes = routes.lines().skip(1).filter_map(words);
    routes.find(|(_, to)| to == "00000000").map(|(interface, _)| interface)
}
