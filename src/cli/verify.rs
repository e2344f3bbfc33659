//! `verify`: checks whether the workers of a running cluster communicate over the expected links.

use clap::Args;

use super::failure::{Exit, Failure};
use super::measure::{Form, Outcome, Ways, measured, measured_between, unmeasured};
use super::{output, reach};
use crate::cluster::Handle;
use crate::cluster::measure::{Subject, Wanted};
use crate::ids::ClusterName;
use crate::plan::EnginePlan;

/// Arguments of `verify`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  cuda-cluster verify demo
  cuda-cluster verify demo --from gpu0 -o table
  cuda-cluster verify demo --all                   # every pair, also of workers of other hosts
  cuda-cluster verify demo --strict                # slow links fail, too")]
pub(super) struct Arguments {
    /// The cluster; optional if only one is running
    #[arg(value_name = "NAME")]
    name: Option<ClusterName>,
    #[command(flatten)]
    ways: Ways,
    /// Also fail if a link is slow, or if it is not known how fast it is
    #[arg(long)]
    strict: bool,
    /// Output format [default: how many are ok, and those that are not]
    #[arg(short, long, value_enum, value_name = "FORM")]
    output: Option<Form>,
}

/// Measures every ordered pair of workers and judges the lanes that it used; of pairs with workers
/// of other machines that have joined a sample, unless every one is wanted.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let found = reach::find(arguments.name.as_ref())?;
    let subject = Subject::of(&found).map_err(unmeasured)?;
    let wanted = arguments.ways.wanted(&subject, arguments.strict)?;
    let every = arguments.ways.are_all() || arguments.strict;
    let mut outcome = Outcome::of(&subject);
    reach::runtime()?.block_on(async {
        if !wanted.is_about_others(&subject).await {
            measured(&wanted, &subject, false, &mut outcome).await?;
        }
        measured_between(&wanted, &subject, every, &mut outcome).await
    })?;
    if let EnginePlan::Dask(dask) = &subject.plan().engine
        && let Some(scheduler) = &dask.join
    {
        outcome.measured.notes.push(format!(
            "these are pairs of this machine: those with others are verified where the scheduler \
             is ({scheduler})"
        ));
    }
    match arguments.output {
        Some(form) => outcome.show(form)?,
        None => outcome.show_answer(arguments.strict)?,
    }
    Ok(if good(&outcome, arguments.strict) { Exit::Done } else { Exit::Unverified })
}

/// Verifies a cluster that is starting, and summarizes the result. If the verification fails,
/// prints what is not as expected; for a program that reads JSON, to standard error.
pub(super) async fn verified(cluster: &Handle, form: output::Form) -> Result<String, Failure> {
    let subject = Subject::of(cluster).map_err(unmeasured)?;
    let (wanted, mut outcome) = (Wanted::verification(&subject), Outcome::of(&subject));
    measured(&wanted, &subject, true, &mut outcome).await?;
    if good(&outcome, false) {
        return Ok(match outcome.pairs().len() {
            0 => outcome.answer(false).trim_end().to_owned(),
            pairs => format!("verified: {pairs} ways use the lanes that they should"),
        });
    }
    match form {
        output::Form::Table => output::print(&outcome.answer(false))?,
        output::Form::Json => {
            let told = outcome.answer(false);
            output::status(&anstream::adapter::strip_str(told.trim_end()).to_string());
        }
    }
    let error = anyhow::anyhow!("the verification failed, so the cluster is taken down");
    Err(Failure::new(Exit::Unverified, error))
}

/// Whether every connection is as expected. One without a figure may be slow.
fn good(outcome: &Outcome, strict: bool) -> bool {
    let is_known = !strict || outcome.measured.left_out == 0;
    let others = outcome.measured.between.as_ref();
    is_known
        && others.is_none_or(|others| others.is_good(strict))
        && outcome.pairs().iter().all(|pair| pair.verdict.is_good(strict))
}
