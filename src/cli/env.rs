//! `env`: prints the environment that clients of a running cluster need, for `eval` in a shell.
//!
//! *Invariant:* standard output gets all variables or none.

use std::collections::BTreeMap;

use clap::Args;
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::{output, plan, reach};
use crate::cluster;
use crate::ids::ClusterName;

/// Arguments of `env`.
#[derive(Args, Debug)]
#[command(
    after_help = "In a shell: eval \"$(cuda-cluster env NAME)\". In a script that should fail \
                        if there is no such cluster: env=$(cuda-cluster env NAME) && eval \
                        \"$env\" || exit\n\nExamples:\n  cuda-cluster env demo"
)]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    name: Option<ClusterName>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Form,
}

/// How the variables are printed.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default)]
enum Form {
    /// Assignments for a POSIX shell
    #[default]
    Shell,
    /// JSON with a stable schema
    Json,
}

/// The JSON form.
#[derive(Debug, Serialize)]
struct Shown {
    version: u32,
    name: ClusterName,
    env: BTreeMap<String, String>,
}

/// Prints the variables.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let found = reach::find(arguments.name.as_ref())?;
    let env = reach::runtime()?.block_on(cluster::client_environment(&found)).map_err(|error| {
        let hint = error.hint(&found.name);
        match error {
            cluster::EnvironmentError::Control(error) => reach::lost(error),
            cluster::EnvironmentError::NotReady { .. } => Failure::new(Exit::NotReady, error),
            _ => Failure::new(Exit::Failed, error),
        }
        .maybe_hint(hint)
    })?;
    match arguments.output {
        Form::Shell => output::print(&plan::assignments(env.iter()))?,
        Form::Json => output::print_json(&Shown { version: 1, name: found.name, env })?,
    }
    Ok(Exit::Done)
}
