//! What `doctor` tries: each check on a machine where it is well and on one where it is not.
//!
//! CUDA itself is tried in `tests/cluster/first_day.rs`, with a driver.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use cuda_cluster::preflight::Severity::{self, Error, Note, Ok as Well, Warning};
use cuda_cluster::preflight::checks;

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

#[test]
fn what_this_process_may_do_is_tried() {
    let said = on("dgx-h100").doctor();
    says(&said, "other-users", Well, "not end them");
    assert_eq!(only(&said, "containment").0, Well);
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
