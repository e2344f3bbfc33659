//! `explain`: says why a task is not running, or why it ran where it did.

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::flags::keys::in_flags;
use super::{output, reach};
use crate::ids::ClusterName;
use crate::wire::tasks::ObjectId;

/// The version of the JSON form.
const VERSION: u32 = 1;

/// Arguments of `explain`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster explain 3:17 demo")]
pub(super) struct Arguments {
    /// The task's id, for example 3:17, as shown in errors and returned by `Remote::id`
    task: ObjectId,
    /// The cluster; optional if only one is running
    name: Option<ClusterName>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Form {
    #[default]
    Text,
    Json,
}

/// The JSON form.
#[derive(Serialize)]
struct Document {
    version: u32,
    task: String,
    why: String,
}

/// Asks the cluster's scheduler.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let failed = |error: crate::cluster::ClientError| {
        let hint = error.hint().map(in_flags);
        Failure::new(Exit::Failed, error).maybe_hint(hint)
    };
    let client = reach::find(arguments.name.as_ref())?.client().map_err(failed)?;
    let why = client.explain(arguments.task).map_err(failed)?;
    let task = arguments.task.to_string();
    match arguments.output {
        Form::Json => output::print_json(&Document { version: VERSION, task, why })?,
        Form::Text => output::print_text(&format!("{why}\n"))?,
    }
    Ok(Exit::Done)
}
