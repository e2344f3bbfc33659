#!/usr/bin/env bash
# Dask's messages from worker to worker over direct://, in turns with Dask's TCP, without mapped
# memory, without memory that is used again, and with distributed-ucxx. Prints medians, CPU time and
# ratios to TCP. Wants a quiet machine.
#
#   scripts/bench-comm.sh [TURNS [CANDIDATE ...]]                  9; tcp direct copied fresh ucxx
#   scripts/bench-comm.sh --graphs WORKERS TURNS [CANDIDATE ...]   tcp direct
#   scripts/bench-comm.sh --cold TURNS [CANDIDATE ...]             tcp direct; new workers each turn
#   scripts/bench-comm.sh --where WORKERS TURNS [CANDIDATE ...]    tcp direct; CPU by what uses it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || scripts/setup.sh --tests
.venv/bin/python scripts/source_tree.py
if [ -z "${CUDA_CLUSTER_COMM:-}" ]; then
    cargo build --release --locked --quiet --lib --package cuda-cluster --package cuda-cluster-comm
    export CUDA_CLUSTER_COMM=$PWD/target/release/lib_comm.so
fi
export PYTHONPATH=$PWD/python
if [ "${1:-}" = --where ]; then exec .venv/bin/python scripts/bench_dask_where.py "${@:2}"; fi
exec .venv/bin/python scripts/bench_comm.py "${@:-9}"
