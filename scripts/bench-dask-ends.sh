#!/usr/bin/env bash
# How long a Python with a cluster takes to end while a task sleeps, until none of its processes is
# left, against LocalCluster with its nannies, in turns; prints the ratios. GPUs are simulated.
#
#   scripts/bench-dask-ends.sh [ROUNDS]
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with distributed
# (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
PYTHONPATH=$PWD/python exec "${PYTHON:-$PWD/.venv/bin/python}" scripts/bench_dask_ends.py "${1:-5}"
