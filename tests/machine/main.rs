//! This machine, as a person inspects it: healthy ones and broken ones, made up.

#![cfg(feature = "cli")]

#[path = "../fake-machine/mod.rs"]
mod fake_machine;
mod faults;
mod probe;
