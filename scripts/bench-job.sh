#!/usr/bin/env bash
# A plain data job on two native workers, in turns with rayon on two threads of one process, on the
# same two CPUs: 1 GiB of f32 in 64 pieces; map, reduction in a tree, gather to the client, put.
# Prints each turn, then medians and ratios (benches/job.rs).
#
#   scripts/bench-job.sh
#   CPUS=0,1 TURNS=7 PIECES=64 MEBIBYTES=16      where, how often, how many pieces, of which size
#
# Client and scheduler need some of the two CPUs, too, so a ratio of 1 is not to be expected.
# Ends with 1 if the map or the gather misses its bound.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(scripts/built.sh bench job)
runtime=$(mktemp -d)
trap 'rm -rf "$runtime"' EXIT
XDG_RUNTIME_DIR=$runtime taskset -c "${CPUS:-0,1}" "$program"
