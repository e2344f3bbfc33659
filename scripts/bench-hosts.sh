#!/usr/bin/env bash
# A Dask cluster over several hosts, which are networks of this machine with made-up GPUs: start, memory,
# a merge, x + x.T, and the end, against `dask cuda worker` and `dask worker` on the same hosts, in turns;
# prints the ratios. Needs root.
#
#   scripts/bench-hosts.sh [ROUNDS] [HOSTS] [GPUS] [CANDIDATE...]      2 rounds, 4 hosts of 25 GPUs each
#
# Candidates are cuda-cluster, 'dask cuda worker' and 'dask worker' (default: all).
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with dask-cuda
# (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rounds=${1:-2} hosts=${2:-4} gpus=${3:-25}
for count in "$rounds" "$hosts" "$gpus"; do
    [[ $count =~ ^[1-9][0-9]*$ ]] || {
        echo "usage: $0 [ROUNDS] [HOSTS] [GPUS] [CANDIDATE...], all numbers from 1" >&2
        exit 2
    }
done
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
[ -e target/debug/examples/fake-machine ] ||
    cargo build --locked --quiet --example fake-machine --example fake_nvml --example fake_cuda
exec scripts/own-network.sh scripts/made-up.sh "$gpus" python "$PWD/scripts/bench_hosts.py" "$rounds" "$hosts" "$gpus" \
    "${@:4}"
