#!/usr/bin/env bash
# Time from the command until the scheduler knows eight workers, memory of the process tree, and
# time until a killed worker is back. Compares cuda-cluster in turn with dask-cuda's
# LocalCUDACluster and `dask cuda worker` if there are GPUs, else with distributed's LocalCluster.
# Prints medians.
#
#   scripts/bench-dask-start.sh [ROUNDS [PROTOCOL]]      5, and tcp or ucxx
#
# On a simulated machine that both can see:
#   env $(cargo run -q --example fake-machine -- dgx-a100 /tmp/a100) scripts/bench-dask-start.sh
# with LD_LIBRARY_PATH set to a directory where libnvidia-ml.so.1 is the library that it printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || scripts/setup.sh --tests
binary=${CUDA_CLUSTER:-target/release/cuda-cluster}
[ "$binary" != target/release/cuda-cluster ] || cargo build --release --locked --quiet
exec .venv/bin/python scripts/bench_dask_start.py "$binary" "${1:-5}" "${2:-tcp}"
