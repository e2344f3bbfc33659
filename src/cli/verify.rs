//! `verify`: checks whether the workers of a running cluster communicate over the expected links.

use clap::Args;

use super::failure::{Exit, Failure};
use super::measure::{Form, Outcome, Subject, Together, Ways};
use super::{output, reach};
use crate::cluster::Handle;
use crate::ids::ClusterName;
use crate::wire::peer::MemoryKind;

/// Message sizes, in bytes, that are large enough to show a link's bandwidth: host memory, device
/// memory.
const SIZES_BYTES: (u64, u64) = (1 << 20, 64 << 20);

/// As [`SIZES_BYTES`], for Dask, whose Python would be most of a smaller message.
const DASK_SIZES_BYTES: (u64, u64) = (16 << 20, 64 << 20);

/// Arguments of `verify`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster verify demo
  cuda-cluster verify demo --from gpu0 -o table
  cuda-cluster verify demo --strict                # slow links fail, too")]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    #[arg(value_name = "NAME")]
    name: Option<ClusterName>,
    #[command(flatten)]
    ways: Ways,
    /// Also fail if a link is slow
    #[arg(long)]
    strict: bool,
    /// Output format [default: how many are ok, and those that are not]
    #[arg(short, long, value_enum, value_name = "FORM")]
    output: Option<Form>,
}

/// Measures every ordered pair of workers and judges the lanes that it used.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let found = reach::find(arguments.name.as_ref())?;
    let outcome = reach::runtime()?.block_on(measured(&found, &arguments.ways))?;
    match arguments.output {
        Some(form) => outcome.show(form)?,
        None => outcome.show_answer(arguments.strict)?,
    }
    Ok(if good(&outcome, arguments.strict) { Exit::Done } else { Exit::Unverified })
}

/// Verifies a cluster that is starting, and summarizes the result. If the verification fails,
/// prints what is not as expected; for a program that reads JSON, to standard error.
pub(super) async fn verified(cluster: &Handle, form: output::Form) -> Result<String, Failure> {
    let outcome = measured(cluster, &Ways::default()).await?;
    if good(&outcome, false) {
        let pairs = outcome.pairs.len();
        return Ok(format!("verified: {pairs} ways use the lanes that they should"));
    }
    match form {
        output::Form::Table => output::print(&outcome.answer(false))?,
        output::Form::Json => output::status(outcome.answer(false).trim_end()),
    }
    let error = anyhow::anyhow!("the verification failed, so the cluster is taken down");
    Err(Failure::new(Exit::Unverified, error))
}

async fn measured(cluster: &Handle, ways: &Ways) -> Result<Outcome, Failure> {
    let subject = Subject::found(cluster)?;
    let (host, device) = if subject.is_dask() { DASK_SIZES_BYTES } else { SIZES_BYTES };
    let size = |memory| match memory {
        MemoryKind::Host => vec![host],
        MemoryKind::Device => vec![device],
    };
    let mut outcome = Outcome::of(&subject);
    ways.measure(&subject, subject.memories(), size, Together::None, &mut outcome).await?;
    Ok(outcome)
}

/// Whether every connection is as expected.
fn good(outcome: &Outcome, strict: bool) -> bool {
    outcome.pairs.iter().all(|pair| pair.verdict.is_good(strict))
}
