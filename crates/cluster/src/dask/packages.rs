//! Which Python packages a plan needs, and which of them are missing.
//!
//! Pure: judges an [`Inspection`].
//!
//! *Invariant:* a package is required only if the plan uses it, and the need names that use.

use std::path::Path;

use super::requirement::{Missing, Need};
use super::{DaskError, Inspection};
use cuda_cluster_model::plan::{DaskPlan, Plan};

/// Oldest Python that today's Dask runs on.
const OLDEST_PYTHON: &str = "3.10";

/// Oldest `distributed` that our processes are tested with (`scripts/oldest-dask.sh`): the first
/// whose `Scheduler.identity` takes `n_workers`.
const OLDEST_DISTRIBUTED: &str = "2025.4";

/// The packages that a plan needs.
pub fn needs(plan: &Plan, dask: &DaskPlan) -> Vec<Need> {
    let plain = |package, purpose| Need { package, by_cuda: false, least: None, purpose };
    let cuda = |package, purpose| Need { by_cuda: true, ..plain(package, purpose) };
    let mut needs = vec![
        plain("dask", "the Dask engine"),
        Need { least: Some(OLDEST_DISTRIBUTED), ..plain("distributed", "the Dask engine") },
    ];
    if dask.protocol.starts_with("ucx") {
        needs.push(cuda("distributed-ucxx", "the protocol ucxx"));
    }
    if dask.protocol == "direct" {
        needs.push(plain("cuda-cluster", "the protocol direct"));
    }
    if !plan.machine.simulated && plan.workers.iter().any(|worker| worker.rmm.is_some()) {
        needs.push(plain("dask-cuda", "RMM memory pools"));
        needs.push(cuda("rmm", "RMM memory pools"));
    }
    if dask.cudf_spill.is_some() && !plan.machine.simulated {
        needs.push(plain("dask-cuda", "cuDF spilling"));
        needs.push(cuda("cudf", "cuDF spilling"));
    }
    let mut once: Vec<Need> = Vec::new();
    for need in needs {
        if !once.iter().any(|other| other.package == need.package) {
            once.push(need);
        }
    }
    once
}

/// Compares a Python's packages with what is needed.
///
/// # Errors
/// If a package is missing, too old, or does not match the others.
pub(super) fn check(path: &Path, found: &Inspection, needs: &[Need]) -> Result<(), DaskError> {
    if older(&found.version, OLDEST_PYTHON) {
        let version = found.version.clone();
        return Err(DaskError::OldPython { path: path.into(), version, least: OLDEST_PYTHON });
    }
    let missing: Vec<Missing> = needs.iter().filter_map(|need| unmet(found, need)).collect();
    let suffixed = with_cuda(found);
    if !missing.is_empty() {
        let cuda_major = suffixed.first().map(|(_, major)| *major);
        return Err(DaskError::Missing { path: path.into(), missing, cuda_major });
    }
    let needed: Vec<&(&str, u32)> = suffixed
        .iter()
        .filter(|(name, _)| needs.iter().any(|need| name.starts_with(need.package)))
        .collect();
    if needed.windows(2).any(|pair| pair[0].1 != pair[1].1) {
        let packages = needed.iter().map(|(name, _)| (*name).to_owned()).collect();
        return Err(DaskError::CudaMismatch { path: path.into(), packages });
    }
    let version = |name| found.packages.get(name).cloned().unwrap_or_default();
    let (dask, distributed) = (version("dask"), version("distributed"));
    // `distributed` requires the `dask` of the same month.
    if numbers(&dask).iter().take(2).ne(numbers(&distributed).iter().take(2)) {
        return Err(DaskError::VersionMismatch { path: path.into(), dask, distributed });
    }
    Ok(())
}

/// A package's version, under its plain name (conda) or with a CUDA suffix (PyPI).
pub(super) fn version<'a>(found: &'a Inspection, package: &str) -> Option<&'a str> {
    let suffixed = |name: &str| {
        let rest = name.strip_prefix(package)?.strip_prefix("-cu")?;
        rest.bytes().all(|byte| byte.is_ascii_digit()).then_some(())
    };
    let one = found.packages.iter().find(|(name, _)| *name == package || suffixed(name).is_some());
    one.map(|(_, version)| version.as_str())
}

fn unmet(found: &Inspection, need: &Need) -> Option<Missing> {
    let present = version(found, need.package).map(str::to_owned);
    match (&present, need.least) {
        (Some(present), Some(least)) if older(present, least) => {}
        (Some(_), _) => return None,
        (None, _) => {}
    }
    Some(Missing { need: need.clone(), present })
}

/// The packages whose names carry a CUDA version, with that version.
fn with_cuda(found: &Inspection) -> Vec<(&str, u32)> {
    let major = |name: &str| name.rsplit_once("-cu")?.1.parse().ok();
    let names = found.packages.keys().map(String::as_str);
    names.filter_map(|name| Some((name, major(name)?))).collect()
}

/// Compares two versions number by number; a part that is not a number counts as 0.
fn older(version: &str, least: &str) -> bool {
    numbers(version) < numbers(least)
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(packages: &[(&str, &str)]) -> Inspection {
        Inspection {
            version: "3.12.1".to_owned(),
            prefix: "/v".into(),
            packages: packages.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
        }
    }

    fn ucx_needs() -> Vec<Need> {
        let text = "version: 1\nengine: dask\nsimulate: true\ngpus: none\ncpu_workers: 1\n\
                    dask: {protocol: ucxx}";
        let spec = cuda_cluster_model::spec::parse(text, "test").expect("right");
        let request = cuda_cluster_model::spec::Request::of(spec).expect("right");
        let plan =
            cuda_cluster_model::plan::plan(&Default::default(), &request, &Default::default());
        let plan = plan.expect("a plan");
        let cuda_cluster_model::plan::EnginePlan::Dask(dask) = &plan.engine else {
            panic!("Dask's")
        };
        needs(&plan, dask)
    }

    #[test]
    fn the_hint_is_a_line_that_installs_what_is_missing() {
        let found = with(&[("dask", "2026.7.1"), ("rmm-cu12", "26.10.0")]);
        let error = check(Path::new("/v/bin/python"), &found, &ucx_needs()).expect_err("missing");
        insta::assert_snapshot!(format!("{error}\n{}", error.hint().expect("a hint")), @r"
        /v/bin/python lacks distributed for the Dask engine, and distributed-ucxx for the protocol ucxx
        /v/bin/python -m pip install 'distributed>=2025.4' distributed-ucxx-cu12
        ");
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        let path = Path::new("/p");
        let needs = ucx_needs();
        let both = |dask, distributed, ucxx: &'static str| {
            with(&[("dask", dask), ("distributed", distributed), (ucxx, "0.52.0")])
        };
        let good = both("2026.7.1", "2026.7.1", "distributed-ucxx-cu13");
        assert!(check(path, &good, &needs).is_ok());
        let by_conda = both("2026.7.1", "2026.7.1", "distributed-ucxx");
        assert!(check(path, &by_conda, &needs).is_ok());

        let unequal = both("2026.7.1", "2026.3.0", "distributed-ucxx-cu13");
        let error = check(path, &unequal, &needs).expect_err("unequal");
        assert!(matches!(error, DaskError::VersionMismatch { .. }), "{error}");

        let old = both("2024.9.0", "2024.9.0", "distributed-ucxx-cu13");
        let error = check(path, &old, &needs).expect_err("old");
        assert!(error.to_string().contains("(it has 2024.9.0)"), "{error}");

        let mut ancient = good.clone();
        ancient.version = "3.9.2".to_owned();
        let error = check(path, &ancient, &needs).expect_err("ancient");
        assert!(matches!(error, DaskError::OldPython { .. }), "{error}");

        let mut mixed = good;
        mixed.packages.insert("distributed-ucxx-cu12".to_owned(), "0.52.0".to_owned());
        let error = check(path, &mixed, &needs).expect_err("mixed");
        assert!(matches!(error, DaskError::CudaMismatch { .. }), "{error}");
    }

    #[test]
    fn the_oldest_dask_is_one_wherever_it_is_named() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let oldest = OLDEST_DISTRIBUTED;
        for (file, text) in [
            ("pyproject.toml", format!("\"dask>={oldest}\", \"distributed>={oldest}\"")),
            ("tests/python/requirements-oldest.txt", format!("\ndistributed=={oldest}.0\n")),
            ("README.md", format!("Dask {oldest} or newer")),
        ] {
            let content = std::fs::read_to_string(root.join(file)).expect("a file of the project");
            assert!(content.contains(&text), "{file} lacks {text}");
        }
    }

    #[test]
    fn another_package_with_the_same_beginning_is_not_it() {
        let found = with(&[("rmm-cutlass", "1"), ("rmmx", "1")]);
        assert_eq!(version(&found, "rmm"), None);
        assert_eq!(version(&with(&[("rmm-cu13", "26.10")]), "rmm"), Some("26.10"));
    }
}
