//! `verify`: whether the workers of a running cluster use the links that they should.

use clap::Args;

use super::bench::{Target, Together};
use super::failure::{Exit, Failure};
use crate::engine::native::links::Verdict;

/// The message size at which every link of a machine shows what it can do, in bytes.
const SIZE_BYTES: u64 = 1 << 20;

/// Arguments of `verify`.
#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,
}

/// Measures every ordered pair of workers and judges the lanes that it used.
pub(super) fn run(arguments: &Arguments) -> Result<Exit, Failure> {
    let outcome = arguments.target.measure(&[SIZE_BYTES], Together::None)?;
    arguments.target.show(&outcome)?;
    let good = outcome.pairs.iter().all(|pair| pair.verdict == Verdict::Ok);
    Ok(if good { Exit::Done } else { Exit::Unverified })
}
