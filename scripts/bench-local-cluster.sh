#!/usr/bin/env bash
# How LocalCUDACluster starts, ends and what it takes, against dask-cuda's and Dask's LocalCluster,
# in turns; prints the ratios. On a made-up machine where there is no GPU.
#
#   scripts/bench-local-cluster.sh [ROUNDS] [WORKERS...]      such as 2 8 32 64 100
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with dask-cuda
# (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
rounds=${1:-5}
shift $(($# > 0))
workers=("${@:-8}")
most=0
for count in "${workers[@]}"; do
    [[ $count =~ ^[1-9][0-9]*$ && $rounds =~ ^[1-9][0-9]*$ ]] || {
        echo "usage: $0 [ROUNDS] [WORKERS...], both numbers from 1" >&2
        exit 2
    }
    most=$((count > most ? count : most))
done
run=(python "$PWD/scripts/bench_local_cluster.py" "$rounds" "${workers[@]}")
if [ -e /dev/nvidiactl ]; then
    PYTHONPATH=$PWD/python exec "${PYTHON:-$PWD/.venv/bin/python}" "${run[@]:1}"
fi
cargo build --locked --quiet --example fake-machine --example fake_nvml --example fake_cuda
exec scripts/made-up.sh "$most" "${run[@]}"
