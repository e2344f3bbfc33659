#!/usr/bin/env bash
# Dask's messages from worker to worker over native://, in turns with Dask's TCP, with native://
# without its pool of memory, and with distributed-ucxx. Prints medians, CPU time and ratios to TCP.
# Wants a quiet machine.
#
#   scripts/bench-comm.sh [TURNS [CANDIDATE ...]]      4; tcp native fresh ucxx
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || scripts/setup.sh --tests
if [ -z "${CUDA_CLUSTER_COMM:-}" ]; then
    cargo build --release --locked --quiet --package cuda-cluster-comm
    export CUDA_CLUSTER_COMM=$PWD/target/release/lib_comm.so
fi
PYTHONPATH=$PWD/python exec .venv/bin/python scripts/bench_comm.py "${@:-4}"
