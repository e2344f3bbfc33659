#!/usr/bin/env bash
# How LocalCUDACluster starts, ends and what it takes, against dask-cuda's, in turns; prints the
# ratios. On a made-up machine where there is no GPU.
#
#   scripts/bench-local-cluster.sh [ROUNDS] [WORKERS]
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with dask-cuda
# (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
run=(python "$PWD/scripts/bench_local_cluster.py" "${1:-5}" "${2:-8}")
if [ -e /dev/nvidiactl ]; then
    PYTHONPATH=$PWD/python exec "${PYTHON:-$PWD/.venv/bin/python}" "${run[@]:1}"
fi
cargo build --locked --quiet --example fake-machine --example fake_nvml --example fake_cuda
exec scripts/made-up.sh "${2:-8}" "${run[@]}"
