#!/usr/bin/env bash
# Runs dask-cuda's own tests, those of its released package, over our LocalCUDACluster, on a made-up
# machine of nine GPUs. Those that cannot pass are listed with their reasons; anything else that
# fails, fails.
#
#   scripts/dask-cuda-tests.sh [--short] [ARGUMENTS OF pytest]
#
# PYTHON names a Python with the packages of tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || scripts/setup.sh --tests
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --locked --quiet --bin cuda-cluster --example fake-machine --example fake_nvml --example fake_cuda
    export CUDA_CLUSTER_BIN=$root/target/debug/cuda-cluster
fi
machine=$root/target/debug/examples/fake-machine
scratch=$(mktemp -d /tmp/ccd.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# This machine's CPUs and memory, and nine GPUs.
"$CUDA_CLUSTER_BIN" topo -o json | "$python" -c '
import json, sys
here = json.load(sys.stdin)
numa = here["numa"][0]
gpu = {"name": "NVIDIA A100-SXM4-40GB", "numa": numa["id"], "cpus": numa["cpus"],
       "memory_bytes": 40 << 30, "compute_capability": "8.0", "mig": []}
here |= {"name": "nine", "notes": []}
here["gpus"] = [
    {"index": i, "uuid": f"GPU-00000000-0000-4000-8000-{i:012}", "pci": f"0000:{i + 1:02x}:00.0", **gpu}
    for i in range(9)
]
json.dump(here, sys.stdout)' > "$scratch/nine.json"
while IFS= read -r variable; do
    # Which UCX is the business of Python.
    case $variable in CUDA_CLUSTER_UCX=*) ;; *) export "${variable?}" ;; esac
done < <("$machine" "$scratch/nine.json" "$scratch/nine")

# The names that the tests start processes by: dask, pytest.
export PATH=${python%/*}:$PATH XDG_RUNTIME_DIR=$scratch PYTHONPATH=$root/python:$root/tests/python
unset CUDA_VISIBLE_DEVICES
export PYTHONDONTWRITEBYTECODE=1 DASK_CUDA_WAIT_WORKERS_MIN_TIMEOUT=${DASK_CUDA_WAIT_WORKERS_MIN_TIMEOUT:-60}
cd "$scratch"
"$python" -m cuda_cluster.as_dask_cuda -m pytest -p dask_cuda_expected -p no:cacheprovider \
    -q -rx --timeout 300 --pyargs dask_cuda.tests "$@"
