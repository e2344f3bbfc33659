//! Packages that the Dask engine needs, and the command that installs those that are missing.
//!
//! Does not decide what a plan needs, or what a Python has; `packages` does.
//!
//! *Invariant:* the command installs every missing package for one CUDA version.

use std::fmt;
use std::path::Path;

/// CUDA's major version in the suggested command when no installed package reveals it.
const USUAL_CUDA: u32 = 13;

/// A package that a plan needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its name without the CUDA suffix.
    pub package: &'static str,
    /// Whether its name on PyPI has a suffix like `-cu13`.
    pub by_cuda: bool,
    /// Oldest version that will do.
    pub least: Option<&'static str>,
    /// What it is needed for.
    pub purpose: &'static str,
}

/// A need that the Python does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The need.
    pub need: Need,
    /// The installed version, if it is too old.
    pub present: Option<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Need { package, least, purpose, .. } = &self.need;
        match (&self.present, least) {
            (Some(present), Some(least)) => {
                write!(f, "{package} {least} or newer for {purpose} (it has {present})")
            }
            _ => write!(f, "{package} for {purpose}"),
        }
    }
}

/// The command that installs what is missing.
pub(super) fn install_line(python: &Path, missing: &[Missing], cuda_major: Option<u32>) -> String {
    let major = cuda_major.unwrap_or(USUAL_CUDA);
    let names: Vec<String> = missing
        .iter()
        .map(|Missing { need, .. }| {
            let suffix = if need.by_cuda { format!("-cu{major}") } else { String::new() };
            let least = need.least.map(|least| format!(">={least}")).unwrap_or_default();
            let name = format!("{}{suffix}{least}", need.package);
            if least.is_empty() { name } else { format!("'{name}'") }
        })
        .collect();
    format!("{} -m pip install {}", python.display(), names.join(" "))
}
