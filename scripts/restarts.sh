#!/usr/bin/env bash
# How long a job is away when one of its ranks is killed: eight ranks of PyTorch (gloo) that are started
# again by torchrun, by `run --restarts`, and by `run --restarts --warm torch`, in turns; prints the ratios,
# and what each leaves behind. GPUs are simulated.
#
#   scripts/restarts.sh [ROUNDS]     default: 5
#   scripts/restarts.sh --plain [ROUNDS]     ranks of plain Python, without torchrun: needs no package
#
# CUDA_CLUSTER_BIN names a release build (default: builds one); PYTHON a Python with torch (default: that
# of target/programs/torch, which is installed if need be: 6 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --release --locked --quiet
    export CUDA_CLUSTER_BIN=$PWD/target/release/cuda-cluster
fi
if [ "${1:-}" = --plain ]; then
    exec "${PYTHON:-python3}" scripts/restarts.py "$@"
fi
if [ -z "${PYTHON:-}" ]; then
    scripts/programs.sh --install torch
    PYTHON=$PWD/target/programs/torch/bin/python
fi
exec "$PYTHON" scripts/restarts.py "$@"
