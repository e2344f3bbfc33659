#!/usr/bin/env bash
# How long tasks that kill their workers take to be given up, against LocalCluster with its nannies,
# in turns; prints the ratios. GPUs are simulated.
#
#   scripts/bench-dask-deaths.sh [ROUNDS] [TASKS]
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with distributed
# (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
PYTHONPATH=$PWD/python exec "${PYTHON:-$PWD/.venv/bin/python}" \
    scripts/bench_dask_deaths.py "${1:-3}" "${2:-3}"
