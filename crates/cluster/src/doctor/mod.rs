//! Checks whether this machine can run clusters, one requirement at a time.
//!
//! Changes nothing on the machine, except for a control group that is created and removed at once.
//!
//! *Invariant:* a check is `ok` only for what was looked at.

pub(crate) mod cuda;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};

use crate::dask;
use cuda_cluster_data::ucx::{self, LIBRARY_VARIABLE, Library, UcpContext, lane_transports};
use cuda_cluster_machine::os::containment::Cgroup;
use cuda_cluster_machine::os::run_directory;
use cuda_cluster_machine::probe::{self, PortError, ProbeError};
use cuda_cluster_model::ids::NicPort;
use cuda_cluster_model::plan::{InstalledUcx, NEEDS_CACHE_SINCE, without_cache};
use cuda_cluster_model::spec::UcxVersion;
use cuda_cluster_model::text::in_full;
use cuda_cluster_model::topology::{PortState, Topology};
use cuda_cluster_model::units::HumanBytes;

/// UCX's transport for device memory within a process, which it has wherever it can use CUDA.
const COPIES: &str = "cuda_copy";

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was checked: `nvidia driver`, `ucx`, `containment`, …
    pub check: String,
    /// The verdict.
    pub verdict: Verdict,
    /// A description without a full stop.
    pub text: String,
    /// A hint for the user.
    pub hint: Option<String>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No problem.
    Ok,
    /// Something that not everybody needs is slower or missing.
    Warning,
    /// No cluster of the native engine can start.
    Failed,
}

impl Finding {
    fn new(check: &str, verdict: Verdict, text: impl Into<String>) -> Self {
        Self { check: check.to_owned(), verdict, text: text.into(), hint: None }
    }

    fn ok(check: &str, text: impl Into<String>) -> Self {
        Self::new(check, Verdict::Ok, text)
    }

    fn warning(check: &str, text: impl Into<String>) -> Self {
        Self::new(check, Verdict::Warning, text)
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// Runs all checks.
pub async fn doctor() -> Vec<Finding> {
    let probed = probe::Options::from_environment().and_then(|options| probe::probe(&options));
    let mut answers = true;
    let mut findings = match &probed {
        Ok(probed) => {
            let mut findings = machine(&probed.topology);
            if let Some(found) = cuda::cuda(&probed.topology) {
                findings.push(found.finding);
                answers = found.answers;
            }
            findings
        }
        Err(error) => vec![broken(error)],
    };
    if answers {
        let driver = probed.is_ok_and(|probed| probed.topology.driver.is_some());
        findings.extend(ucx(driver));
    } else {
        // UCX would open the driver in this process, and hang in it.
        let text = "not opened, because CUDA does not answer";
        findings.push(Finding::new("ucx", Verdict::Failed, text));
    }
    findings.push(other_users());
    findings.extend([containment(), run_directories(), shared_memory(), locked_memory()]);
    findings.extend(ptrace());
    findings.push(python().await);
    findings
}

fn broken(error: &ProbeError) -> Finding {
    let finding = Finding::warning("nvidia driver", error.to_string());
    Finding { hint: error.hint(), ..finding }
}

fn machine(topology: &Topology) -> Vec<Finding> {
    let mut findings = Vec::new();
    let simulate = "without a GPU: cuda-cluster up --topology dgx-h100 --simulate";
    findings.push(match (&topology.driver, topology.gpus.len()) {
        (Some(driver), 0) => {
            Finding::warning("nvidia driver", format!("{driver}, which shows no GPU"))
                .hint("in a container, give it the GPUs (--gpus all)")
        }
        (Some(driver), gpus) => Finding::ok("nvidia driver", format!("{driver}, {gpus} GPUs")),
        (None, _) => Finding::warning("nvidia driver", "there is none").hint(simulate),
    });
    let ports = || topology.nics.iter().flat_map(|nic| &nic.ports);
    let active = ports().filter(|port| port.state == Some(PortState::Active)).count();
    let all = ports().count();
    findings.push(match (topology.nics.len(), active) {
        (0, _) => Finding::ok("rdma", "no InfiniBand or RoCE adapter"),
        (nics, 0) => Finding::warning("rdma", format!("{nics} adapters, no active port"))
            .hint("see ibstat; a down port needs a cable, a subnet manager, or its driver"),
        (nics, _) => {
            let text = format!("{nics} adapters, {active} of {all} ports active");
            match closed_port(topology) {
                None => Finding::ok("rdma", text),
                Some((port, error)) => {
                    let finding = Finding::warning("rdma", format!("{text}, but {port}: {error}"));
                    error.hint().into_iter().fold(finding, Finding::hint)
                }
            }
        }
    });
    let here = topology.cpus().map(|cpus| cpus.len()).unwrap_or_default();
    let allowed = topology.allowed.as_ref().map_or(here, |allowed| allowed.cpus.len());
    findings.push(match allowed < here {
        true => Finding::warning("cpus", format!("{allowed} of {here} CPUs may be used"))
            .hint("an affinity mask or a cgroup (Slurm, a container) takes the rest"),
        false => Finding::ok("cpus", format!("{here} CPUs, all of which may be used")),
    });
    findings
}

/// The first active port that this user cannot use.
fn closed_port(topology: &Topology) -> Option<(NicPort, PortError)> {
    topology.nics.iter().find_map(|nic| {
        let mut active = nic.ports.iter().filter(|port| port.state == Some(PortState::Active));
        active.find_map(|port| {
            let port = NicPort { nic: nic.name.clone(), port: Some(port.port) };
            probe::check_port(&port).err().map(|error| (port, error))
        })
    })
}

/// The libucp for native workers on this machine's GPUs, and the others that are installed. One
/// that is built for CUDA and has none of its transports has not found the driver usable.
fn ucx(driver: bool) -> Vec<Finding> {
    let caller = probe::caller();
    let installed = caller.ucx_libraries.unwrap_or_default();
    let named = std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from);
    let rdma = probe_has_rdma();
    let enough = |library: &&InstalledUcx| library.cuda && (library.verbs || !rdma);
    let best = installed.iter().find(enough).or(installed.iter().find(|library| library.cuda));
    let best = best.filter(|_| named.is_none());
    let path = named.or(best.map(|library| PathBuf::from(&library.path)));
    let mut version = None;
    let mut findings = vec![match opened(path.as_deref()) {
        Ok((found, text)) => {
            version = Some(UcxVersion { major: found.major, minor: found.minor });
            let is_it = |one: &&InstalledUcx| {
                path.as_deref().is_some_and(|path| Path::new(&one.path).starts_with(path))
            };
            match best.or_else(|| installed.iter().find(is_it)).filter(|library| library.cuda) {
                Some(best) if driver && !text.contains(COPIES) => {
                    let text = format!(
                        "{text} ({}, built for CUDA, but without {COPIES} here)",
                        best.whose
                    );
                    Finding::warning("ucx", text).hint(
                        "UCX found no usable CUDA driver; UCX_LOG_LEVEL=debug ucx_info -d says why",
                    )
                }
                Some(best) => Finding::ok("ucx", format!("{text} ({}, knows CUDA)", best.whose)),
                None => Finding::ok("ucx", text),
            }
        }
        Err(error) => {
            let hint = error.hint();
            let text = in_full(&error);
            Finding { hint, ..Finding::new("ucx", Verdict::Failed, text) }
        }
    }];
    findings.extend(version.and_then(|version| registration_cache(version, &caller.variables)));
    let used = |library: &&InstalledUcx| path.as_deref() == Some(Path::new(&library.path));
    let say = |InstalledUcx { path, whose, cuda, verbs, .. }: &InstalledUcx| {
        let knows = match (cuda, verbs) {
            (true, true) => "knows CUDA and InfiniBand",
            (true, false) => "knows CUDA, without InfiniBand",
            (false, true) => "knows InfiniBand, without CUDA",
            (false, false) => "without CUDA and InfiniBand",
        };
        format!("{path} ({whose}, {knows})")
    };
    let others: Vec<String> = installed.iter().filter(|one| !used(one)).map(say).collect();
    if !others.is_empty() {
        findings.push(Finding::ok("ucx installed", others.join("; ")));
    }
    if !installed.iter().any(|library| library.cuda) {
        findings.push(
            Finding::warning("ucx for GPUs", "no libucp that knows CUDA is installed")
                .hint("pip install libucx-cu13 (or -cu12), or HPC-X; then --ucx auto finds it"),
        );
    } else if rdma && !installed.iter().any(|library| library.cuda && library.verbs) {
        let text = "no libucp is installed that knows both CUDA and InfiniBand";
        findings.push(Finding::warning("ucx for InfiniBand", text).hint(
            "HPC-X, or conda-forge's ucx (conda install -c conda-forge ucx); PyPI's libucx is \
                 built without InfiniBand",
        ));
    }
    findings
}

/// The version of a libucp, as it reports it. This process opens only one: two would mix their
/// parts.
fn opened(path: Option<&Path>) -> Result<(ucx::Version, String), ucx::Error> {
    let library = Library::open(path)?;
    let resources = UcpContext::new(&library, &[])?.resources()?;
    let transports = lane_transports(&resources).join(" ");
    let (version, name) = (library.version(), library.name().display());
    Ok((version, format!("{version} from {name}: {transports}")))
}

/// Warns if variables disable UCX's registration cache, without which current UCX versions do not
/// survive every loss of a peer; `None` otherwise.
fn registration_cache(
    version: UcxVersion,
    variables: &BTreeMap<String, String>,
) -> Option<Finding> {
    let off: Vec<String> =
        without_cache(variables).map(|(name, value)| format!("{name}={value}")).collect();
    if off.is_empty() || version < NEEDS_CACHE_SINCE {
        return None;
    }
    let text = format!(
        "off ({}): UCX {version} may crash a worker when a peer is lost in the middle of a large \
         message (openucx/ucx#11467)",
        off.join(", ")
    );
    let mend = "unset it, or use a UCX that has the fix for openucx/ucx#11485";
    Some(Finding::warning("ucx registration cache", text).hint(mend))
}

/// What other users can do to processes that use UCX's shared memory.
fn other_users() -> Finding {
    match ucx::try_guarding_wakeups() {
        Ok(()) => Finding::ok(
            "other users",
            "can wake processes that use UCX within this machine, which costs CPU time, but not \
             end them",
        ),
        Err(error) => {
            let text = format!(
                "can end processes that use UCX within this machine with an empty datagram: {error}"
            );
            Finding::warning("other users", text).hint(
                "the system must have /proc and let processes filter their sockets \
                 (SO_ATTACH_FILTER); a sandbox or a seccomp profile may forbid it",
            )
        }
    }
}

fn containment() -> Finding {
    match Cgroup::create(&format!("doctor-{}", std::process::id())) {
        Ok(group) => {
            group.remove();
            Finding::ok("containment", "a control group with cgroup.kill")
        }
        Err(error) => Finding::ok(
            "containment",
            format!("process groups and a subreaper (no control group: {error})"),
        ),
    }
}

fn run_directories() -> Finding {
    let base = run_directory::base();
    let names = match run_directory::names() {
        Ok(names) => names,
        Err(error) => {
            let hint = error.hint();
            let text = in_full(&error);
            return Finding { hint, ..Finding::new("run directories", Verdict::Failed, text) };
        }
    };
    let dead = names.iter().filter(|name| !run_directory::Paths::of(name).is_alive()).count();
    let clusters = match names.len() {
        0 => "no cluster".to_owned(),
        1 => "1 cluster".to_owned(),
        count => format!("{count} clusters"),
    };
    let ended = if dead > 0 { format!(", {dead} of them ended") } else { String::new() };
    let text = format!("{} ({clusters}{ended})", base.display());
    Finding::ok("run directories", text)
}

/// Checks how UCX's shared-memory transports get memory: System V segments, or files here.
fn shared_memory() -> Finding {
    const LEAST: u64 = 64 << 20;
    match statvfs("/dev/shm") {
        Ok(system) => {
            let bytes = system.blocks_available().saturating_mul(system.fragment_size());
            let text = format!("{} free in /dev/shm", HumanBytes(bytes));
            if bytes < LEAST {
                Finding::warning("shared memory", text)
                    .hint("in a container: --shm-size=1g, or --ipc=host")
            } else {
                Finding::ok("shared memory", text)
            }
        }
        Err(errno) => Finding::warning("shared memory", format!("/dev/shm: {}", errno.desc())),
    }
}

/// RDMA pins memory, which counts against this limit.
fn locked_memory() -> Finding {
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if soft == nix::libc::RLIM_INFINITY => {
            Finding::ok("locked memory", "no limit")
        }
        Ok((soft, _)) => {
            let finding = Finding::ok("locked memory", format!("limit {}", HumanBytes(soft)));
            if probe_has_rdma() {
                Finding { verdict: Verdict::Warning, ..finding }
                    .hint("RDMA pins memory: ulimit -l unlimited (limits.conf, or LimitMEMLOCK=)")
            } else {
                finding
            }
        }
        Err(errno) => Finding::warning("locked memory", errno.desc()),
    }
}

fn probe_has_rdma() -> bool {
    let entries = std::fs::read_dir("/sys/class/infiniband");
    entries.is_ok_and(|mut entries| entries.next().is_some())
}

/// Bulk host transfers (UCX's `cma`) read another process's memory, which Yama may forbid.
fn ptrace() -> Option<Finding> {
    let path = Path::new("/proc/sys/kernel/yama/ptrace_scope");
    let scope: u32 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
    let text = format!("kernel.yama.ptrace_scope is {scope}");
    Some(match scope {
        0 | 1 => Finding::ok("cross memory attach", text),
        _ => Finding::warning("cross memory attach", text)
            .hint("2 and 3 forbid it to ordinary users: host transfers are then copied twice"),
    })
}

async fn python() -> Finding {
    let own = probe::own_environment();
    let found = match dask::find(None, own.as_deref(), |name| std::env::var_os(name)) {
        Ok(found) => found,
        Err(error) => {
            let finding = Finding::warning("python (dask engine)", error.to_string());
            return Finding { hint: error.hint(), ..finding };
        }
    };
    let place = format!("{} ({})", found.path.display(), found.reason);
    match dask::inspect(&found.path).await {
        Ok(inspection) => {
            let version = |name: &str| inspection.packages.get(name).cloned();
            match version("distributed") {
                Some(distributed) => Finding::ok(
                    "python (dask engine)",
                    format!("{} with distributed {distributed}, {place}", inspection.version),
                ),
                None => Finding::warning(
                    "python (dask engine)",
                    format!("{} has no distributed, {place}", inspection.version),
                )
                .hint("for --engine dask: pip install dask distributed"),
            }
        }
        Err(error) => {
            let finding = Finding::warning("python (dask engine)", format!("{error}, {place}"));
            Finding { hint: error.hint(), ..finding }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_cache_that_is_off_is_a_warning_with_what_to_do() {
        let set = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
        let version = |minor| UcxVersion { major: 1, minor };
        let said = registration_cache(version(21), &set("UCX_MEM_EVENTS", "No"));
        let Some(Finding { verdict: Verdict::Warning, text, hint: Some(hint), .. }) = said else {
            panic!("{said:?}")
        };
        assert!(text.contains("UCX_MEM_EVENTS=No") && text.contains("1.21"), "{text}");
        assert!(hint.contains("unset"), "{hint}");
        for (minor, value) in [(21, "y"), (21, "try"), (13, "n")] {
            let said = registration_cache(version(minor), &set("UCX_RCACHE_ENABLE", value));
            assert_eq!(said, None);
        }
    }
}
