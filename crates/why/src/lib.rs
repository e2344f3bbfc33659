//! Why a job hangs: evidence from outside, and a verdict.
//!
//! Ends nothing, changes nothing, and asks no process for its help.
//!
//! *Invariant:* the verdict is a function of the [`Evidence`] alone, so that what was saved on one
//! machine is judged the same on another.

#![allow(missing_docs, reason = "a part of the house; what users see is documented there")]

pub mod audit;
mod calls;
mod condition;
pub mod evidence;
mod follow;
pub mod look;
pub mod patience;
pub mod verdict;
pub mod wires;

pub use evidence::Evidence;
pub use verdict::{Verdict, judge};
