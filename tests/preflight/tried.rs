//! What `doctor` tries: each check on a machine where it is well and on one where it is not.
//!
//! Two checks only inform, and have no bad side: `ucx-installed`, which lists, and `containment`,
//! both of whose ways keep a cluster together. CUDA itself is tried in `tests/cluster/first_day.rs`, with a driver.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use cuda_cluster::preflight::Severity::{self, Error, Note, Ok as Well, Warning};
use cuda_cluster::preflight::checks;
use nix::libc;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::fake_machine::ucx;
use crate::machine::{Place, Said, on};
use crate::skip::skip;

/// Variables that lead to no installed library and no Python.
const BARE: [(&str, &str); 4] =
    [("PATH", "/bin:/sbin"), ("VIRTUAL_ENV", ""), ("CONDA_PREFIX", ""), ("HPCX_UCX_DIR", "")];

fn bare() -> Place {
    BARE.iter().fold(on("dgx-h100"), |place, (name, value)| place.variable(name, value))
}

/// The only finding of a check.
fn only(said: &Said, id: &str) -> (Severity, String) {
    match &said.of(id)[..] {
        [one] => (one.severity, one.text.clone()),
        other => panic!("{id}: {other:#?}"),
    }
}

#[track_caller]
fn says(said: &Said, id: &str, severity: Severity, part: &str) {
    let (is, text) = only(said, id);
    assert!(is == severity && text.contains(part), "{id} is {is:?}: {text}");
}

/// A folder like HPC-X's, with these modules beside its library.
fn installation(folder: &Path, modules: &[&str]) -> String {
    fs::create_dir_all(folder.join("lib/ucx")).expect("made");
    fs::write(folder.join("lib/libucp.so.0"), "\x7fELF").expect("written");
    for module in modules {
        fs::write(folder.join("lib/ucx").join(module), "").expect("written");
    }
    folder.to_str().expect("UTF-8").to_owned()
}

#[test]
fn the_driver_the_plan_and_the_run_directory() {
    let folder = tempfile::tempdir().expect("a directory");
    let base = folder.path().to_str().expect("UTF-8");
    let place = |place: Place| place.variable("XDG_RUNTIME_DIR", base);
    let well = place(on("dgx-h100")).doctor();
    says(&well, "driver", Well, "8 GPUs");
    says(&well, "run-directories", Well, base);
    assert!(well.of("plan").is_empty(), "{well:#?}");

    let none = place(on("dgx-h100")).variable("CUDA_CLUSTER_NVML", "/nonexistent/libnvml.so");
    let none = none.doctor();
    says(&none, "driver", Error, "/nonexistent/libnvml.so");
    assert_eq!(none.code, Some(4));
    let many = place(on("dgx-h100")).asked(&["--n-workers", "99", "--gpus", "all"]).doctor();
    says(&many, "plan", Error, "99");
    assert_eq!(many.code, Some(4));
    // A file where the directory should be.
    fs::write(folder.path().join("cuda-cluster"), "").expect("written");
    let file = place(on("dgx-h100")).doctor();
    says(&file, "run-directories", Error, base);
    assert_eq!(file.code, Some(4));
}

#[test]
fn a_python_is_needed_by_the_dask_engine_alone() {
    let without = bare().doctor();
    says(&without, "python", Note, "");
    assert_eq!(only(&bare().asked(&["--engine", "dask"]).doctor(), "python").0, Error);
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    if !python.exists() {
        return skip("dask", "doctor's python: .venv is not there, see scripts/setup.sh --tests");
    }
    let with =
        on("dgx-h100").variable("VIRTUAL_ENV", concat!(env!("CARGO_MANIFEST_DIR"), "/.venv"));
    says(&with.doctor(), "python", Well, "distributed");
}

#[test]
fn libraries_of_ucx_are_opened_listed_and_missed() {
    let Some(libucp) = ucx::with_cuda() else {
        return skip("ucx-cuda", "doctor's UCX: libucx-cu13 is not in .venv");
    };
    let libucp = libucp.to_str().expect("UTF-8");
    let folder = tempfile::tempdir().expect("a directory");
    let cuda = installation(&folder.path().join("cuda"), &["libuct_cuda.so"]);
    let both = installation(&folder.path().join("both"), &["libuct_cuda.so.0", "libuct_ib.so.0"]);
    let opened = |place: Place| place.variable("CUDA_CLUSTER_UCX", libucp);

    // The library for CUDA finds no driver on this machine.
    let said = opened(bare()).variable("HPCX_UCX_DIR", &both).doctor();
    says(&said, "ucx", Warning, "without cuda_copy here");
    says(&said, "ucx-installed", Well, &format!("{both}/lib/libucp.so.0 (HPC-X, knows CUDA and"));
    assert!(said.of("ucx-rdma").is_empty() && said.of("ucx-cuda").is_empty(), "{said:#?}");
    let missing = bare().variable("CUDA_CLUSTER_UCX", "/nonexistent/libucp.so.0").doctor();
    says(&missing, "ucx", Error, "/nonexistent/libucp.so.0");
    says(&missing, "ucx-cuda", Warning, "no libucp that knows CUDA");
    assert_eq!(missing.code, Some(4));
    let host_alone = |place: Place| place.variable("CUDA_CLUSTER_UCX", "/nonexistent/libucp.so.0");
    let asked = |place: Place| place.asked(&["--enable-nvlink", "--enable-infiniband"]);
    let without = asked(host_alone(bare()).variable("HPCX_UCX_DIR", &cuda)).doctor();
    says(&without, "ucx-rdma", Warning, "both CUDA and InfiniBand");
    let unasked = host_alone(bare()).variable("HPCX_UCX_DIR", &cuda).doctor();
    says(&unasked, "ucx-rdma", Note, "both CUDA and InfiniBand");

    let off = opened(on("dgx-h100")).variable("UCX_RCACHE_ENABLE", "n").doctor();
    says(&off, "ucx-registration-cache", Warning, "UCX_RCACHE_ENABLE=n");
    assert!(opened(on("dgx-h100")).doctor().of("ucx-registration-cache").is_empty());
}

/// What `doctor` says on a thread of its own, which `prepare` has put into a sandbox: its processes
/// are in it, too, and this test's others are not.
fn sandboxed(prepare: impl FnOnce() -> Option<()> + Send) -> Option<Said> {
    let inside = || prepare().map(|()| on("dgx-h100").doctor());
    std::thread::scope(|scope| scope.spawn(inside).join().expect("doctor answers"))
}

#[test]
fn an_end_by_other_users_is_told_where_a_sandbox_forbids_to_filter_sockets() {
    says(&on("dgx-h100").doctor(), "other-users", Well, "not end them");
    let said = sandboxed(|| seccompiler::apply_filter(&no_filters_of_sockets()).ok());
    let said = said.expect("a filter of its own calls needs no rights");
    says(&said, "other-users", Warning, "with an empty datagram");
    assert!(
        said.of("other-users")[0].remedy.as_ref().is_some_and(|it| !it.is_empty()),
        "{said:#?}"
    );
}

/// Refuses `setsockopt(…, SO_ATTACH_FILTER, …)` as a container's profile would.
fn no_filters_of_sockets() -> seccompiler::BpfProgram {
    let attach = u64::try_from(libc::SO_ATTACH_FILTER).expect("positive");
    let (length, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
    let option = SeccompCondition::new(2, length, equal, attach).expect("the third argument");
    let rule = SeccompRule::new(vec![option]).expect("a condition");
    let refused = SeccompAction::Errno(u32::try_from(libc::EPERM).expect("positive"));
    let arch = std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows");
    let rules = [(libc::SYS_setsockopt, vec![rule])].into();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch).expect("rules");
    filter.try_into().expect("a program")
}

/// Either way keeps a cluster together, so neither is bad; which one it is must be true.
#[test]
fn how_processes_are_kept_together_is_what_was_found() {
    let hidden = sandboxed(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).ok()?;
        let mount = |arguments: &[&str]| {
            let done = std::process::Command::new("mount").args(arguments).status().ok()?;
            done.success().then_some(())
        };
        mount(&["--make-rprivate", "/"])?;
        mount(&["-t", "tmpfs", "none", "/sys/fs/cgroup"])
    });
    let Some(hidden) = hidden else {
        return skip("root", "how processes are kept together: nothing can be mounted here");
    };
    says(&hidden, "containment", Well, "process groups and a subreaper (no control group: ");
    let (severity, text) = only(&on("dgx-h100").doctor(), "containment");
    assert_eq!(severity, Well);
    let without = text.starts_with("process groups and a subreaper (no control group: ");
    assert!(without || text == "a control group with cgroup.kill", "{text}");
}

#[test]
fn no_tried_check_is_left_out() {
    let tried: BTreeSet<&str> =
        checks().filter(|check| !check.is_judged()).map(|check| check.id).collect();
    let here = [
        "containment",
        "driver",
        "other-users",
        "plan",
        "python",
        "run-directories",
        "ucx",
        "ucx-cuda",
        "ucx-installed",
        "ucx-rdma",
        "ucx-registration-cache",
    ];
    // In `tests/cluster/first_day.rs` and `kernels.rs`.
    let elsewhere = ["cuda", "nvrtc"];
    assert_eq!(here.into_iter().chain(elsewhere).collect::<BTreeSet<_>>(), tried);
}
