//! Finds the Python to use: the one that was asked for, that of the active environment, or that of
//! the environment into which this program was installed.
//!
//! Does not look at its packages; `inspect` does.
//!
//! *Invariant:* a [`Found`] is an executable file, with the reason for choosing it.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::DaskError;

/// A Python, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub path: PathBuf,
    /// Like `the active virtual environment`.
    pub reason: &'static str,
}

/// Finds the Python to use. `variable` gives the caller's environment variables.
///
/// `asked` is a program, by path or by a name that is looked up in `PATH`, or the directory of an
/// environment. `own` is the environment into which this program was installed, if any.
///
/// # Errors
/// If there is none, or none under the name that was asked for.
pub fn find(
    asked: Option<&str>,
    own: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Found, DaskError> {
    let in_path = |name: &str| {
        let path = variable("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| runs(file))
    };
    if let Some(asked) = asked {
        let named = Path::new(asked);
        let reason = "as asked for";
        let candidates = [named.to_owned(), named.join("bin/python"), named.join("bin/python3")];
        let direct = candidates.into_iter().find(|file| runs(file));
        let by_name = || if asked.contains('/') { None } else { in_path(asked) };
        return match direct.filter(|_| asked.contains('/')).or_else(by_name) {
            Some(path) => Ok(Found { path: absolute(path), reason }),
            None => Err(DaskError::NotThere { path: named.to_owned() }),
        };
    }
    let environments = [
        ("VIRTUAL_ENV", "the active virtual environment"),
        ("CONDA_PREFIX", "the active conda environment"),
    ];
    let mut looked_for = Vec::new();
    for (name, reason) in environments {
        let Some(folder) = variable(name).filter(|folder| !folder.is_empty()) else {
            looked_for.push(format!("{name} (not set)"));
            continue;
        };
        let path = Path::new(&folder).join("bin/python");
        if runs(&path) {
            return Ok(Found { path, reason });
        }
        looked_for.push(format!("{} ({name})", path.display()));
    }
    if let Some(path) = own.map(|own| own.join("bin/python")).filter(|path| runs(path)) {
        return Ok(Found { path, reason: "the environment into which this program was installed" });
    }
    looked_for.push("python3 (PATH)".to_owned());
    let path = in_path("python3").ok_or(DaskError::NoPython { looked_for })?;
    Ok(Found { path, reason: "the first python3 in PATH" })
}

/// Makes a path absolute, because the processes may run in another directory.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

fn runs(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;

    fn program(path: &Path) {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, "").expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    fn with(variables: &[(&str, PathBuf)]) -> impl Fn(&str) -> Option<OsString> {
        let map: BTreeMap<String, OsString> =
            variables.iter().map(|(name, value)| ((*name).into(), value.into())).collect();
        move |name: &str| map.get(name).cloned()
    }

    #[test]
    fn what_was_asked_for_comes_first_then_the_environments_and_last_the_path() {
        let folder = tempfile::tempdir().expect("a directory");
        let root = folder.path();
        for environment in ["venv", "conda", "own"] {
            program(&root.join(environment).join("bin/python"));
        }
        program(&root.join("path/python3"));
        program(&root.join("path/python3.13"));
        let path = ("PATH", root.join("path"));
        let (venv, conda) =
            (("VIRTUAL_ENV", root.join("venv")), ("CONDA_PREFIX", root.join("conda")));
        let found = |asked: Option<&str>, variables: &[(&str, PathBuf)]| {
            find(asked, None, with(variables)).map(|found| found.path).ok()
        };
        let all = [path.clone(), venv.clone(), conda.clone()];
        assert_eq!(found(None, &all), Some(root.join("venv/bin/python")));
        assert_eq!(found(None, &[path.clone(), conda]), Some(root.join("conda/bin/python")));
        let own = root.join("own");
        let installed = |variables: &[(&str, PathBuf)]| {
            find(None, Some(&own), with(variables)).map(|found| found.path).ok()
        };
        assert_eq!(installed(&all), Some(root.join("venv/bin/python")));
        assert_eq!(installed(std::slice::from_ref(&path)), Some(root.join("own/bin/python")));
        assert_eq!(found(None, &[path]), Some(root.join("path/python3")));
        assert_eq!(found(Some("python3.13"), &all), Some(root.join("path/python3.13")));
        let folder = root.join("conda").display().to_string();
        assert_eq!(found(Some(&folder), &all), Some(root.join("conda/bin/python")));
    }

    #[test]
    fn none_is_an_error_that_says_where_it_could_have_been() {
        let nothing = find(None, None, with(&[("VIRTUAL_ENV", PathBuf::from("/nowhere"))]));
        let text = nothing.expect_err("there is none").to_string();
        assert!(text.contains("/nowhere/bin/python (VIRTUAL_ENV)"), "{text}");
        assert!(text.contains("CONDA_PREFIX (not set), python3 (PATH)"), "{text}");
        let asked = find(Some("/nowhere/python"), None, with(&[])).expect_err("it is not there");
        assert!(matches!(asked, DaskError::NotThere { .. }), "{asked}");
    }
}
