#!/usr/bin/env bash
# Merge on a simulated machine in two halves, between which links are a tenth as fast: compares
# placing tasks by learned bandwidth with placing them in turn. Both clusters run side by side and
# work alternately.
# usage: scripts/bench-placement.sh [PAIRS]     pairs of runs for each size, 5 by default
set -euo pipefail
cd "$(dirname "$0")/.."

pairs=${1:-5}
python=${PYTHON:-python3}
binary=${BINARY:-target/release/cuda-cluster}
[ -x "$binary" ] || cargo build --release --quiet

BINARY=$binary PAIRS=$pairs exec "$python" scripts/bench_placement.py
