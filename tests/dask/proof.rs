//! `--verify`: READY means that data went between all workers, over the expected transports.

use super::{down, packages, try_up, up};
use crate::sandbox::Sandbox;

/// Variables that remove shared memory from connections with error handling, which is also the
/// effect of leaving them unset.
const PLAIN: &str = "{UCX_POSIX_ERROR_HANDLING: n, UCX_CMA_MEMORY_INVALIDATE: n}";

const SHARED_MEMORY: [&str; 2] = ["posix/memory", "cma/memory"];

#[test]
fn every_pair_moves_data_over_shared_memory_before_ready_is_said() {
    if !packages() {
        return;
    }
    for (protocol, transports) in [("ucxx", &SHARED_MEMORY[..]), ("tcp", &["tcp"])] {
        let sandbox = Sandbox::new();
        up(&sandbox, "pairs", &["--n-workers", "3", "--verify", "--protocol", protocol]);
        let state = sandbox.state("pairs");
        for worker in state["workers"].as_array().expect("workers") {
            let peers = worker["peers"].as_array().expect("peers");
            assert_eq!(peers.len(), 2, "{worker}");
            for peer in peers {
                let lanes = peer["lanes"].as_array().expect("lanes");
                let lanes: Vec<&str> = lanes.iter().filter_map(|lane| lane.as_str()).collect();
                assert!(lanes.iter().any(|lane| transports.contains(lane)), "{worker}");
            }
        }
        down(&sandbox, "pairs");
    }
}

#[test]
fn a_pair_that_fell_back_to_tcp_is_an_error_that_says_so() {
    if !packages() {
        return;
    }
    let sandbox = Sandbox::new();
    let folder = tempfile::tempdir().expect("a directory");
    let spec = folder.path().join("spec.yaml").display().to_string();
    std::fs::write(&spec, format!("version: 1\nucx: {{env: {PLAIN}}}\n")).expect("written");
    let flags = ["--n-workers", "2", "--protocol", "ucxx", "--verify", "-f", &spec];
    let said = try_up(&sandbox, "fell", &flags);
    assert_eq!(said.code, 1, "{said}");
    assert!(said.stderr.contains("comes over tcp/"), "{said}");
    assert!(said.stderr.contains("expected was one of posix, sysv"), "{said}");
}
