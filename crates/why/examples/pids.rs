//! Looks at any processes, each as a rank, and prints the evidence as JSON:
//! `cargo run -p cuda-cluster-why --example pids -- 1234 1235`.
#![allow(clippy::print_stdout, missing_docs)]

use cuda_cluster_why::evidence::Rank;
use cuda_cluster_why::judge;
use cuda_cluster_why::look::{Limits, look};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rank = |(number, pid): (u32, String)| {
        let pid = pid.parse()?;
        Ok(Rank {
            name: format!("rank{number}"),
            pid: Some(pid),
            number: Some(number),
            ..Rank::default()
        })
    };
    let ranks: Result<Vec<Rank>, std::num::ParseIntError> =
        (0..).zip(std::env::args().skip(1)).map(rank).collect();
    let evidence = look(ranks?, false, Limits::default());
    println!("{}", serde_json::to_string_pretty(&(judge(&evidence), evidence))?);
    Ok(())
}
