//! Which libucp are installed, and whether they know CUDA.
//!
//! Looks at files only: a process that opened two libucp would mix their parts.
//!
//! *Invariant:* every path is there, and none is listed twice.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::plan::InstalledUcx;

/// The name that every libucp since 1.0 has.
const LIBRARY: &str = "libucp.so.0";

/// Every libucp where one is usually found: the active Python environment's, HPC-X's, conda's, the
/// system's, in this order.
pub(super) fn installed(variable: impl Fn(&str) -> Option<OsString>) -> Vec<InstalledUcx> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (directory, whose) in places(variable) {
        let path = directory.join(LIBRARY);
        let Ok(real) = path.canonicalize() else { continue };
        let Some(text) = path.to_str().filter(|_| seen.insert(real)) else { continue };
        let cuda = knows_cuda(&directory);
        found.push(InstalledUcx { path: text.to_owned(), whose: whose.to_owned(), cuda });
    }
    found
}

/// UCX's CUDA transports are a module beside the library.
fn knows_cuda(directory: &Path) -> bool {
    entries(&directory.join("ucx")).iter().any(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("libuct_cuda.so"))
    })
}

fn places(variable: impl Fn(&str) -> Option<OsString>) -> Vec<(PathBuf, &'static str)> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut places = Vec::new();
    let mut pythons: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].map(path).into_iter().flatten().collect();
    pythons.extend(first_python(variable("PATH")));
    for python in pythons {
        for packages in site_packages(&python) {
            places.push((packages.join("libucx/lib"), "PyPI's libucx in the Python environment"));
        }
    }
    let hpcx = [path("HPCX_UCX_DIR"), path("HPCX_DIR").map(|hpcx| hpcx.join("ucx"))];
    let unpacked = entries(Path::new("/opt")).into_iter().filter(|entry| {
        entry
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("hpcx"))
    });
    let hpcx = hpcx.into_iter().flatten().chain(unpacked.map(|hpcx| hpcx.join("ucx")));
    places.extend(hpcx.map(|ucx| (ucx.join("lib"), "HPC-X")));
    places.extend(path("CONDA_PREFIX").map(|conda| (conda.join("lib"), "conda")));
    let named = variable("LD_LIBRARY_PATH").unwrap_or_default();
    places.extend(std::env::split_paths(&named).map(|place| (place, "LD_LIBRARY_PATH")));
    let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let system = ["/usr/local/ucx/lib", "/opt/ucx/lib", "/usr/local/lib", &multiarch];
    let system = system.into_iter().chain(["/usr/lib64", "/usr/lib"]);
    places.extend(system.map(|place| (PathBuf::from(place), "the system")));
    places
}

/// Where the first Python of a search path is installed.
fn first_python(search: Option<OsString>) -> Option<PathBuf> {
    let search = search?;
    let bin = std::env::split_paths(&search).find(|bin| bin.join("python3").exists())?;
    Some(bin.parent()?.to_owned())
}

fn site_packages(python: &Path) -> Vec<PathBuf> {
    let versions = entries(&python.join("lib")).into_iter().filter(|entry| {
        entry
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("python3"))
    });
    versions.map(|version| version.join("site-packages")).collect()
}

/// What is in a directory, in order; nothing if it cannot be read.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = directory.read_dir().into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with these files, all empty.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            std::fs::write(path, "").expect("a file");
        }
        root
    }

    #[test]
    fn the_active_environments_libucx_comes_first_and_its_module_says_that_it_knows_cuda() {
        let packages = "venv/lib/python3.11/site-packages/libucx/lib";
        let (pip, module) =
            (format!("{packages}/libucp.so.0"), format!("{packages}/ucx/libuct_cuda.so.0"));
        let root = tree(&[&pip, &module, "hpcx/ucx/lib/libucp.so.0"]);
        let found = installed(|name| match name {
            "VIRTUAL_ENV" => Some(root.path().join("venv").into()),
            "HPCX_DIR" => Some(root.path().join("hpcx").into()),
            _ => None,
        });
        assert_eq!(found[0].path, root.path().join(&pip).display().to_string());
        assert!(found[0].cuda);
        assert_eq!((found[1].whose.as_str(), found[1].cuda), ("HPC-X", false));
    }

    #[test]
    fn a_library_that_is_reached_in_two_ways_is_listed_once() {
        let root = tree(&["env/lib/libucp.so.0"]);
        let found = installed(|name| match name {
            "CONDA_PREFIX" => Some(root.path().join("env").into()),
            "LD_LIBRARY_PATH" => Some(root.path().join("env/lib").into()),
            _ => None,
        });
        let ours = found.iter().filter(|one| one.path.starts_with(&*root.path().to_string_lossy()));
        assert_eq!(ours.count(), 1, "{found:?}");
    }
}
