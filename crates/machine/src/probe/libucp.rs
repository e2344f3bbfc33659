//! Finds the installed libucp, checks them for CUDA and InfiniBand support, and checks paths that
//! users give.
//!
//! Looks at files only: a process that opened two libucp would mix their parts.
//!
//! *Invariant:* every listed path exists, and none is listed twice.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cuda_cluster_model::plan::{InstalledUcx, LIBRARY_VARIABLE};

/// The file name of every libucp since 1.0.
const LIBRARY: &str = "libucp.so.0";

/// The first bytes of every program and library (`ELFMAG` in `elf.h`).
const MAGIC: [u8; 4] = *b"\x7fELF";

/// Why a path is not that of a libucp.
#[derive(Debug, thiserror::Error)]
pub enum NoLibucp {
    /// The path does not exist.
    #[error("cannot read a libucp at {path:?}")]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The directory contains none.
    #[error("there is no libucp in {}: neither {LIBRARY} nor lib/{LIBRARY}", path.display())]
    NotWithin {
        /// The path as given.
        path: PathBuf,
    },
    /// The file is not a library.
    #[error("{} is not a shared library, so it is no libucp", path.display())]
    NotALibrary {
        /// The path as given.
        path: PathBuf,
    },
}

impl NoLibucp {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        let text = "check the path that 'ucx.library' or CUDA_CLUSTER_UCX names: a libucp.so.0, \
                    its directory, or the installation with it in lib";
        Some(text.to_owned())
    }
}

/// Checks that a path is that of a libucp: the file, its directory, or its installation's.
///
/// A bare file name that does not exist here is left to the dynamic loader.
///
/// # Errors
/// If it is not.
pub fn check_libucp(path: &Path) -> Result<(), NoLibucp> {
    if path.is_dir() {
        let within = ["", "lib"].map(|folder| path.join(folder).join(LIBRARY));
        let found = within.iter().any(|file| file.exists());
        return found.then_some(()).ok_or_else(|| NoLibucp::NotWithin { path: path.to_owned() });
    }
    let bare = path.components().count() == 1 && path.to_string_lossy().starts_with("libucp.so");
    let mut first = [0; MAGIC.len()];
    match File::open(path).and_then(|mut file| file.read_exact(&mut first)) {
        Ok(()) if first == MAGIC => Ok(()),
        Err(error) if bare && error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) if source.kind() != io::ErrorKind::UnexpectedEof => {
            Err(NoLibucp::Unreadable { path: path.to_owned(), source })
        }
        _ => Err(NoLibucp::NotALibrary { path: path.to_owned() }),
    }
}

/// Every libucp in the usual places: the one that the user names, the active Python environment,
/// the one into which this program was installed (`own`), HPC-X, conda, the system, in this order.
pub(super) fn installed(
    own: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<InstalledUcx> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (directory, whose) in places(own, variable) {
        let path = directory.join(LIBRARY);
        let Ok(real) = path.canonicalize() else { continue };
        let Some(text) = path.to_str().filter(|_| seen.insert(real)) else { continue };
        let brings = |module: &str| has_module(&directory, module);
        let mut ucx = InstalledUcx::new(text, whose);
        ucx.cuda = brings("libuct_cuda.so");
        ucx.verbs = brings("libuct_ib.so");
        // Reading it takes a millisecond, and without CUDA nobody chooses it.
        ucx.told_grace = ucx.cuda && is_told_grace(&directory);
        found.push(ucx);
    }
    found
}

/// Whether UCX has the variable: its names are text in the library of its services.
fn is_told_grace(directory: &Path) -> bool {
    let Ok(library) = std::fs::read(directory.join("libucs.so.0")) else { return false };
    memchr::memmem::find(&library, b"BISTRO_GRACE_DURATION").is_some()
}

/// UCX's transports beyond shared memory and TCP are modules beside the library.
fn has_module(directory: &Path, module: &str) -> bool {
    entries(&directory.join("ucx")).iter().any(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(module))
    })
}

fn places(
    own: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<(PathBuf, &'static str)> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut places = Vec::new();
    if let Some(named) = path(LIBRARY_VARIABLE) {
        // A library, its directory, or its installation.
        let file = named.is_file().then(|| named.parent().map(Path::to_owned)).flatten();
        let within = [named.clone(), named.join("lib")];
        places.extend(
            file.into_iter().chain(within).map(|place| (place, "named by CUDA_CLUSTER_UCX")),
        );
    }
    let mut pythons: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].map(path).into_iter().flatten().collect();
    pythons.extend(own.map(Path::to_owned));
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

/// The Python environment (venv or conda) into which this process's program was installed, if any.
pub fn own_environment() -> Option<PathBuf> {
    environment_of(&std::env::current_exe().ok()?)
}

/// Whether the Python environment into which this program was installed has `direct://`, Dask's
/// communication backend of the same wheel, and no other environment is active.
pub(super) fn has_direct(own: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> bool {
    let Some(own) = own else { return false };
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    let mut active = active.filter(|folder| !folder.is_empty());
    let same = active.next().is_none_or(|active| {
        let real = |path: &Path| path.canonicalize().ok();
        real(Path::new(&active)) == real(own)
    });
    let module = Path::new("cuda_cluster/_comm.abi3.so");
    // A free-threaded Python, as `python3.14t`, loads no module of this ABI.
    let loads = |packages: &&PathBuf| !packages.to_string_lossy().ends_with("t/site-packages");
    same && site_packages(own).iter().filter(loads).any(|packages| packages.join(module).exists())
}

fn environment_of(program: &Path) -> Option<PathBuf> {
    let root = program.parent()?.parent()?;
    let marks = ["pyvenv.cfg", "conda-meta"];
    marks.iter().any(|mark| root.join(mark).exists()).then(|| root.to_owned())
}

/// The installation directory of the first Python on a search path.
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

/// Sorted entries of a directory; none if it can't be read.
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
        let hpcx = ["hpcx/ucx/lib/libucp.so.0", "hpcx/ucx/lib/ucx/libuct_ib.so.0.0.0"];
        let root = tree(&[&pip, &module, hpcx[0], hpcx[1]]);
        let found = installed(None, |name| match name {
            "VIRTUAL_ENV" => Some(root.path().join("venv").into()),
            "HPCX_DIR" => Some(root.path().join("hpcx").into()),
            _ => None,
        });
        assert_eq!(found[0].path, root.path().join(&pip).display().to_string());
        assert_eq!((found[0].cuda, found[0].verbs), (true, false));
        assert_eq!((found[1].cuda, found[1].verbs), (false, true));
        assert_eq!(found[1].whose, "HPC-X");
        assert!(!found[0].told_grace, "it has no libucs that knows the variable");
        let services = root.path().join(packages).join("libucs.so.0");
        std::fs::write(services, "\0BISTRO_GRACE_DURATION\0").expect("written");
        let environment = root.path().join("venv");
        let found =
            installed(None, |name| (name == "VIRTUAL_ENV").then(|| environment.clone().into()));
        assert!(found[0].told_grace);
    }

    #[test]
    fn the_libucx_that_was_installed_with_this_program_needs_no_active_environment() {
        let file = "own/lib/python3.11/site-packages/libucx/lib/libucp.so.0";
        let root = tree(&[file, "own/pyvenv.cfg", "own/bin/cuda-cluster", "usr/bin/cuda-cluster"]);
        let own = environment_of(&root.path().join("own/bin/cuda-cluster"));
        assert_eq!(own, Some(root.path().join("own")));
        let found = installed(own.as_deref(), |_| None);
        assert_eq!(found[0].path, root.path().join(file).display().to_string());
        assert_eq!(environment_of(&root.path().join("usr/bin/cuda-cluster")), None);
    }

    #[test]
    fn a_library_is_found_by_its_path_its_directory_and_its_installation() {
        let root = tree(&["ucx/lib/libucp.so.0", "ucx/share/readme", "empty/readme"]);
        let at = |path: &str| check_libucp(&root.path().join(path));
        let text = "ucx/lib/libucp.so.0";
        assert!(matches!(at(text), Err(NoLibucp::NotALibrary { .. })), "an empty file is none");
        std::fs::write(root.path().join(text), b"\x7fELF and more").expect("written");
        for there in [text, "ucx/lib", "ucx"] {
            assert!(at(there).is_ok(), "{there}");
        }
        for elsewhere in ["ucx/share", "empty"] {
            assert!(matches!(at(elsewhere), Err(NoLibucp::NotWithin { .. })), "{elsewhere}");
        }
        for missing in ["nowhere", "nowhere/libucp.so.0", "ucx/lib/libucp.so.0/more"] {
            assert!(matches!(at(missing), Err(NoLibucp::Unreadable { .. })), "{missing}");
        }
        assert!(matches!(at("ucx/share/readme"), Err(NoLibucp::NotALibrary { .. })));
    }

    #[test]
    fn a_bare_file_name_is_left_to_the_dynamic_loader() {
        assert!(check_libucp(Path::new("libucp.so.0")).is_ok());
        assert!(check_libucp(Path::new("nothing-of-the-kind")).is_err());
        assert!(check_libucp(Path::new("")).is_err());
    }

    #[test]
    fn the_library_that_the_user_names_is_known_however_it_is_named() {
        let root = tree(&["ucx/lib/libucp.so.0", "ucx/lib/ucx/libuct_cuda.so.0"]);
        for name in ["ucx/lib/libucp.so.0", "ucx/lib", "ucx"] {
            let named = || Some(root.path().join(name).into());
            let found =
                installed(None, |variable| (variable == LIBRARY_VARIABLE).then(named).flatten());
            let file = root.path().join("ucx/lib/libucp.so.0").display().to_string();
            assert_eq!(found.first().map(|first| first.path.clone()), Some(file), "{name}");
            assert_eq!((found[0].cuda, found[0].verbs), (true, false));
        }
    }

    #[test]
    fn an_environment_has_direct_if_its_python_loads_the_module_and_no_other_one_is_active() {
        let module =
            |python| format!("{python}/lib/{python}/site-packages/cuda_cluster/_comm.abi3.so");
        let root = tree(&[&module("python3.14"), &module("python3.14t"), "other/bin/python"]);
        let own = |python| Some(root.path().join(python));
        assert!(has_direct(own("python3.14").as_deref(), |_| None));
        assert!(!has_direct(own("python3.14t").as_deref(), |_| None), "it is free-threaded");
        assert!(!has_direct(own("other").as_deref(), |_| None) && !has_direct(None, |_| None));
        let other = |name: &str| (name == "VIRTUAL_ENV").then(|| root.path().join("other").into());
        assert!(!has_direct(own("python3.14").as_deref(), other), "another one is active");
    }

    #[test]
    fn a_library_that_is_reached_in_two_ways_is_listed_once() {
        let root = tree(&["env/lib/libucp.so.0"]);
        let found = installed(None, |name| match name {
            "CONDA_PREFIX" => Some(root.path().join("env").into()),
            "LD_LIBRARY_PATH" => Some(root.path().join("env/lib").into()),
            _ => None,
        });
        let ours = found.iter().filter(|one| one.path.starts_with(&*root.path().to_string_lossy()));
        assert_eq!(ours.count(), 1, "{found:?}");
    }
}
