// What must hold for every text: no panic, and what is read can be written and read again.

use cuda_cluster::topology::parse;

/// Reads a text, and checks what was read.
pub fn hold(text: &str) {
    let Ok(topology) = parse(text) else { return };
    assert_eq!(parse(&topology.to_yaml()).as_ref(), Ok(&topology), "YAML says everything");
    let _ = (topology.to_matrix(), topology.to_tree(), topology.to_nccl());
    let _ = (topology.to_dot(), topology.to_svg());
}
