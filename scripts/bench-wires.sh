#!/usr/bin/env bash
# x + x.T and merges on eight Dask workers between which there are the wires of a DGX-1, one tenth as fast
# for pairs without NVLink: places tasks by these wires, and as Dask does. The wires are made up
# (tests/python/wires), and how exact they are is measured first. Then the same with equal wires. Both
# clusters run side by side and take turns; the results of both are compared.
# usage: scripts/bench-wires.sh [TURNS [CASE...]]     7 by default; told, learned, equal
#        scripts/bench-wires.sh TURNS cost            what it costs the scheduler
#        scripts/bench-wires.sh TURNS model           what it saves on the wires, whatever this machine does
#        scripts/bench-wires.sh RUNS graphs           no speed: random graphs with kills have the right results
#   WORKERS=8 FASTEST=20e6     bytes per second of the fastest wires
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
binary=${CUDA_CLUSTER_BIN:-target/release/cuda-cluster}
[ -x "$binary" ] || cargo build --release --locked --quiet
script=bench_wires.py
if [ "${2:-}" = cost ]; then script=bench_wires_cost.py; fi
if [ "${2:-}" = model ]; then script=bench_wires_model.py; fi
if [ "${2:-}" = graphs ]; then
    CUDA_CLUSTER_BIN=$binary exec "$python" tests/python/wires/graphs.py "$1"
fi
CUDA_CLUSTER_BIN=$binary PYTHONPATH=tests/python/wires TURNS=${1:-7} exec "$python" "scripts/$script" "${@:2}"
