#!/usr/bin/env bash
# What people compute with Dask (`examples/dask`: SVD, x + x.T, merge, groupby, rechunk, XGBoost, joblib, taxi
# rides, futures) on Dask's LocalCluster, dask-cuda's LocalCUDACluster (which needs a GPU) and ours, over TCP
# and over shared memory: time, memory, bytes moved, and whether each result is that of the same work without
# Dask. GPUs are simulated where there is none.
#
#   scripts/workloads.sh [--turns 3] [--workers 4] [--only svd,merge] [--times 1] [--memory-limit 300MB]
#
# Scale 1 is the size in the file of each workload; `--times` multiplies the shares of it that fit two CPUs and
# 24 GiB. CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with the packages of
# tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    cargo build --release --locked --quiet --package cuda-cluster-comm
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster CUDA_CLUSTER_COMM=$PWD/target/release/lib_comm.so
fi
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-.venv/bin/python}" scripts/workloads.py "$@"
