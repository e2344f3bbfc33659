//! What `doctor` says of machines that are not well, each spoiled in one place, and that it says
//! nothing of those that are.
//!
//! The program runs on made-up machines, so that what gathers the evidence is tested, too.
//!
//! *Invariant:* each check is seen to speak on a bad machine and to be silent on the good one.

#[path = "../fake-machine/mod.rs"]
mod fake_machine;

mod bad;
mod healthy;
mod machine;
mod plans;
mod records;
#[path = "../skip/mod.rs"]
mod skip;
mod table;
mod tried;
