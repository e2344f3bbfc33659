//! Real work: the same results as without a cluster, whatever dies meanwhile.

use super::{packages, up};
use crate::sandbox::Sandbox;

fn gives_the_numbers_of_numpy_and_pandas(protocol: &str) {
    let sandbox = Sandbox::new();
    let cluster = up(&sandbox, "work", &["--n-workers", "4", "--protocol", protocol]);
    cluster.tell("work");
    cluster.tell("crash");
    assert_eq!(sandbox.run(&["down", "work"]).code, 0);
    sandbox.assert_only_the_causes_are_left("work");
}

#[test]
fn work_over_tcp_gives_the_numbers_of_numpy_and_pandas_though_a_worker_is_killed() {
    if packages() {
        gives_the_numbers_of_numpy_and_pandas("tcp");
    }
}

#[test]
fn work_over_ucx_gives_the_numbers_of_numpy_and_pandas_though_a_worker_is_killed() {
    if packages() {
        gives_the_numbers_of_numpy_and_pandas("ucxx");
    }
}
