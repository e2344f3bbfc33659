#!/usr/bin/env bash
# How fast an array of 256 MB moves between workers, and over which lanes: with the environment that
# cuda-cluster plans, in turn with distributed's LocalCluster over UCX with its defaults, and over
# TCP. Prints the medians and the ratio.
#
#   scripts/bench-dask-transfer.sh [ROUNDS]      5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || scripts/setup.sh --tests
binary=${CUDA_CLUSTER:-target/release/cuda-cluster}
[ "$binary" != target/release/cuda-cluster ] || cargo build --release --locked --quiet
exec .venv/bin/python scripts/bench_dask_transfer.py "$binary" "${1:-5}"
