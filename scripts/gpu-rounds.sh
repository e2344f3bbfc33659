#!/usr/bin/env bash
# Rounds of transposes, merges under kills, spilling, links and `verify` on made-up GPUs of small
# memory, on which freed memory counts as long as peers have it mapped. Ends with 1 at the first
# failure; at the end an idle cluster keeps nothing but what peers may have mapped, and says so.
#
#   scripts/gpu-rounds.sh [OPTIONS]     --rounds N (200), --gpus 2|8|16 (all three), --seed N,
#                                       --whole-every N (all pairs in each N-th round; 1)
#   BINARY=PATH                         default: target/release/cuda-cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo build --locked --quiet --example fake-machine --example fake_nvml --example fake_cuda
if [ -z "${BINARY:-}" ]; then
    cargo build --locked --quiet --release --bin cuda-cluster
fi
exec "${PYTHON:-python3}" scripts/gpu_rounds.py "$@" "${BINARY:-target/release/cuda-cluster}"
