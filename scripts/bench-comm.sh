#!/usr/bin/env bash
# Dask's messages from worker to worker over direct://, in turns with Dask's TCP, without mapped
# memory, without memory that is used again, and with distributed-ucxx. Prints medians, CPU time and
# ratios to TCP. Wants a quiet machine.
#
#   scripts/bench-comm.sh [TURNS [CANDIDATE ...]]                  9; tcp direct copied fresh ucxx
#   scripts/bench-comm.sh --graphs WORKERS TURNS [CANDIDATE ...]   tcp direct
#   scripts/bench-comm.sh --cold TURNS [CANDIDATE ...]             tcp direct; new workers each turn, busy and idle
#   scripts/bench-comm.sh --where WORKERS TURNS [CANDIDATE ...]    tcp direct; CPU by what uses it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-9}" in
--graphs | --where) numbers=("${@:2:2}") wanted=2 ;;
--cold) numbers=("${@:2:1}") wanted=1 ;;
*) numbers=("${1:-9}") wanted=1 ;;
esac
good=0
for number in "${numbers[@]}"; do [[ $number =~ ^[1-9][0-9]*$ ]] && good=$((good + 1)); done
if [ "$good" -ne "$wanted" ]; then
    echo "bench-comm: '$*' lacks a number of turns or workers; the use is:" >&2
    sed -n 's/^#   /  /p' scripts/bench-comm.sh >&2
    exit 2
fi
[ -x .venv/bin/python ] || scripts/setup.sh --tests
.venv/bin/python scripts/source_tree.py
if [ -z "${CUDA_CLUSTER_COMM:-}" ]; then
    cargo build --release --locked --quiet --lib --package cuda-cluster --package cuda-cluster-comm
    export CUDA_CLUSTER_COMM=$PWD/target/release/lib_comm.so
fi
export PYTHONPATH=$PWD/python
if [ "${1:-}" = --where ]; then exec .venv/bin/python scripts/bench_dask_where.py "${@:2}"; fi
exec .venv/bin/python scripts/bench_comm.py "${@:-9}"
