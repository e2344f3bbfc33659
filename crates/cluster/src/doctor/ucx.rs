//! UCX: the libucp that workers would load, the others that are installed, its registration cache.
//!
//! *Invariant:* a process opens one libucp: two would mix their parts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::child::{Child, Heard, order, say};
use cuda_cluster_data::ucx::{self, LIBRARY_VARIABLE, Library, UcpContext, lane_transports};
use cuda_cluster_model::plan::{CallerEnvironment, InstalledUcx, NEEDS_CACHE_SINCE, without_cache};
use cuda_cluster_model::preflight::{Finding, Severity};
use cuda_cluster_model::spec::UcxVersion;
use cuda_cluster_model::text::in_full;
use cuda_cluster_model::topology::Topology;

/// The hidden subcommand of the other process.
pub(crate) const SUBCOMMAND: &str = "__try-ucx";

/// Time to open it: UCX looks at every device, and opens the driver.
const LIMIT: Duration = Duration::from_secs(60);

/// UCX's transport for device memory within a process, which it has wherever it can use CUDA.
const COPIES: &str = "cuda_copy";

fn finding(id: &str, severity: Severity, text: impl Into<String>) -> Finding {
    Finding::tried(id, severity, text)
}

/// The libucp for native workers on this machine's GPUs, and the others that are installed. One
/// that is built for CUDA and has none of its transports has not found the driver usable.
pub(super) fn ucx(
    answers: bool,
    topology: &Topology,
    rdma_planned: bool,
    caller: &CallerEnvironment,
) -> Vec<Finding> {
    if !answers {
        // UCX would open the driver in this process, and hang in it.
        let text = "not opened, because CUDA does not answer";
        return vec![finding("ucx", Severity::Error, text)];
    }
    let driver = topology.driver.is_some();
    let installed = caller.ucx_libraries.as_deref().unwrap_or_default();
    let rdma = !topology.nics.is_empty();
    let (path, best) = chosen(topology, caller);
    let mut version = None;
    let mut findings = vec![match opened(path.as_deref()) {
        Ok((found, text)) => {
            version = Some(found);
            let is_it = |one: &&InstalledUcx| {
                path.as_deref().is_some_and(|path| Path::new(&one.path).starts_with(path))
            };
            match best.or_else(|| installed.iter().find(is_it)).filter(|library| library.cuda) {
                Some(best) if driver && !text.contains(COPIES) => {
                    let text = format!(
                        "{text} ({}, built for CUDA, but without {COPIES} here)",
                        best.whose
                    );
                    finding("ucx", Severity::Warning, text).remedy(
                        "UCX found no usable CUDA driver; UCX_LOG_LEVEL=debug ucx_info -d says why",
                    )
                }
                Some(best) => {
                    finding("ucx", Severity::Ok, format!("{text} ({}, knows CUDA)", best.whose))
                }
                None => finding("ucx", Severity::Ok, text),
            }
        }
        Err((text, hint)) => {
            hint.into_iter().fold(finding("ucx", Severity::Error, text), Finding::remedy)
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
        findings.push(finding("ucx-installed", Severity::Ok, others.join("; ")));
    }
    if !installed.iter().any(|library| library.cuda) {
        // Without a GPU nobody needs it.
        let severity = if driver { Severity::Warning } else { Severity::Note };
        let text = "no libucp that knows CUDA is installed";
        findings.push(finding("ucx-cuda", severity, text));
    } else if rdma && !installed.iter().any(|library| library.cuda && library.verbs) {
        let text = "no libucp is installed that knows both CUDA and InfiniBand";
        let severity = if rdma_planned { Severity::Warning } else { Severity::Note };
        findings.push(finding("ucx-rdma", severity, text));
    }
    findings
}

/// The libucp for native workers: the one that is named, or the best that is installed, which is
/// the second value; `None` leaves it to the dynamic loader.
pub(super) fn chosen<'a>(
    topology: &Topology,
    caller: &'a CallerEnvironment,
) -> (Option<PathBuf>, Option<&'a InstalledUcx>) {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE) {
        return (Some(PathBuf::from(named)), None);
    }
    let installed = caller.ucx_libraries.as_deref().unwrap_or_default();
    let rdma = !topology.nics.is_empty();
    let enough = |library: &&InstalledUcx| library.cuda && (library.verbs || !rdma);
    let best = installed.iter().find(enough).or(installed.iter().find(|library| library.cuda));
    (best.map(|library| PathBuf::from(&library.path)), best)
}

/// What the other process says of a libucp.
#[derive(Serialize, Deserialize)]
enum Told {
    /// Its version, and what it has.
    Opened { version: (u32, u32), text: String },
    /// It cannot be opened.
    Fails { text: String, hint: Option<String> },
}

/// The version of a libucp, as it reports it, and what it has. In a process of its own: a library
/// may end its process, and writes to standard output as the caller's variables say.
fn opened(path: Option<&Path>) -> Result<(UcxVersion, String), (String, Option<String>)> {
    let told = || {
        let other: Child<Told> = Child::start(SUBCOMMAND, [], &path)?;
        match other.hear(LIMIT) {
            Heard::Told(told) => other.end().map(|_| Ok(told)),
            Heard::Silence => {
                other.kill()?;
                Ok(Err(format!("no answer within {LIMIT:.0?}")))
            }
            Heard::End => {
                let ended = other.end()?;
                let last = ended.last_error.map(|line| format!(": {line}")).unwrap_or_default();
                let status = ended.status.map(|status| format!(" ({status})")).unwrap_or_default();
                Ok(Err(format!("the process that opened it ended{status}{last}")))
            }
        }
    };
    match told() {
        Ok(Ok(Told::Opened { version: (major, minor), text })) => {
            Ok((UcxVersion { major, minor }, text))
        }
        Ok(Ok(Told::Fails { text, hint })) => Err((text, hint)),
        Ok(Err(text)) => Err((text, None)),
        Err(error) => Err((in_full(&error), None)),
    }
}

/// The other process: opens the library that it is told of.
pub(crate) fn main() -> ExitCode {
    let Some(path) = order::<Option<PathBuf>>() else { return ExitCode::from(2) };
    let opened = || {
        let library = Library::open(path.as_deref())?;
        let resources = UcpContext::new(&library, &[])?.resources()?;
        let transports = lane_transports(&resources).join(" ");
        let (version, name) = (library.version(), library.name().display());
        let text = format!("{version} from {name}: {transports}");
        Ok(Told::Opened { version: (version.major, version.minor), text })
    };
    let told = opened().unwrap_or_else(|error: ucx::Error| Told::Fails {
        hint: error.hint(),
        text: in_full(&error),
    });
    // Nobody listens any more, if it fails.
    say(&told).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
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
    let text = format!("off ({}), with UCX {version}", off.join(", "));
    Some(finding("ucx-registration-cache", Severity::Warning, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_cache_that_is_off_is_a_warning_with_what_to_do() {
        let set = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
        let version = |minor| UcxVersion { major: 1, minor };
        let said = registration_cache(version(21), &set("UCX_MEM_EVENTS", "No"));
        let Some(Finding { severity: Severity::Warning, text, remedy: Some(hint), .. }) = said
        else {
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
