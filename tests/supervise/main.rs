//! The supervisor with real processes.

#![cfg(feature = "cli")]

#[path = "../bench/mod.rs"]
mod bench;
mod binding;
mod containment;
mod control;
mod life;
mod rest;
mod restart;
#[path = "../skip/mod.rs"]
mod skip;
