//! `fake-machine TOPOLOGY FOLDER [FAULTS]`: writes a made-up machine and prints the environment to see
//! it in.
//!
//! `env $(cargo run -q --example fake-machine -- dgx-h100 /tmp/x) cuda-cluster topo` then looks at a
//! DGX H100, and `up` brings workers up on its GPUs, whose memory UCX moves: the machine has a CUDA
//! driver over host memory. `FAULTS` are those of `cuda/faults.rs`; they stand in
//! `CUDA_CLUSTER_FAKE_CUDA_FAULTS`, so several need quotes there.

#![allow(clippy::print_stdout)]

#[path = "mod.rs"]
mod fake_machine;

use std::path::Path;

use anyhow::{Context, bail};
use cuda_cluster::topology;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (source, folder, faults) = match arguments.as_slice() {
        [source, folder] => (source, folder, ""),
        [source, folder, faults] => (source, folder, faults.as_str()),
        _ => bail!("usage: fake-machine TOPOLOGY FOLDER [FAULTS]"),
    };
    let text = match topology::builtin(source) {
        Some(text) => text.to_owned(),
        None => std::fs::read_to_string(source).with_context(|| source.clone())?,
    };
    let machine = topology::parse(&text)?;
    std::fs::create_dir_all(folder)?;
    let folder = Path::new(folder).canonicalize()?;
    let fake = fake_machine::FakeMachine::write(&machine, &folder)
        .and_then(|fake| fake.with_driver(faults))
        .with_context(|| format!("cannot write the machine to {}", folder.display()))?;
    for (variable, value) in fake.environment() {
        println!("{variable}={}", value.display());
    }
    if let Some(library) = fake_machine::ucx::with_cuda() {
        println!("CUDA_CLUSTER_UCX={}", library.display());
    }
    Ok(())
}
