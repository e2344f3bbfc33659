//! The wheel: built, installed into a new environment, and used as the README says.
//!
//! A test program of its own: the wheel's build puts the program into `target/debug` again, compiled
//! without the tests' features, and no other test may look for it there meanwhile.

#[path = "packages/mod.rs"]
mod packages;
#[path = "skip/mod.rs"]
mod skip;

use std::process::Command;

use packages::{packages, passes, root};

#[test]
fn what_it_installs_does_what_the_readme_says() {
    if packages() {
        passes(Command::new(root().join("scripts/wheel-check.sh")).arg("--short"));
    }
}
