//! Binds this process and becomes a program: the shim's work without a supervisor around it.
//!
//! *Invariant:* the program runs only with the binding in force, or with its absence told.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::binding::{self, InForce};
use crate::cpuset::{CpuSet, NodeSet};
use crate::plan::Binding;

/// What a binding came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// CPUs in force.
    pub cpus: CpuSet,
    /// NUMA nodes of the memory policy in force; empty for the default policy.
    pub mems: NodeSet,
    /// What could not be applied, a sentence each.
    pub notes: Vec<String>,
}

/// Binds the calling thread, and so whatever it executes; other threads of this process stay.
pub fn bind(binding: &Binding) -> Bound {
    let InForce { cpus, mems, notes } = binding::apply(binding);
    Bound { cpus, mems, notes }
}

/// Becomes `program`. Returns only with the reason why it could not.
pub fn execute(
    program: &OsStr,
    arguments: &[OsString],
    env: &BTreeMap<String, String>,
) -> io::Error {
    Command::new(program).args(arguments).envs(env).exec()
}
