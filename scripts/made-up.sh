#!/usr/bin/env bash
# Runs a command on a made-up machine: the CPUs of this one's first NUMA node, all of its memory, and
# so many GPUs. With CUDA_CLUSTER_BIN and PYTHONPATH set for the Python package of this tree.
#
#   scripts/made-up.sh GPUS COMMAND ...
#
# PYTHON names a Python with the packages of tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
gpus=$1
shift
export PYTHON=${PYTHON:-$root/.venv/bin/python}
[ -x "$PYTHON" ] || scripts/setup.sh --tests >&2
if [ -z "${CUDA_CLUSTER_BIN:-}" ]; then
    cargo build --locked --quiet --bin cuda-cluster --example fake-machine --example fake_nvml --example fake_cuda
    export CUDA_CLUSTER_BIN=$root/target/debug/cuda-cluster
fi
scratch=$(mktemp -d /tmp/ccm.XXXXXX)
# Again, because a cluster may be removing its own files there.
trap 'rm -rf "$scratch" 2>/dev/null || { sleep 1; rm -rf "$scratch"; }' EXIT
"$CUDA_CLUSTER_BIN" topo -o json | "$PYTHON" -c '
import json, os, sys
here = json.load(sys.stdin)
numa = here["numa"][0]
# What Dask takes for the machine. A virtual machine that has grown may tell less of its nodes.
numa["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
here["numa"] = [numa]
gpu = {"name": "NVIDIA A100-SXM4-40GB", "numa": numa["id"], "cpus": numa["cpus"],
       "memory_bytes": 40 << 30, "compute_capability": "8.0", "mig": []}
here |= {"name": "made up", "notes": []}
here["gpus"] = [
    {"index": i, "uuid": f"GPU-00000000-0000-4000-8000-{i:012}", "pci": f"0000:{i + 1:02x}:00.0", **gpu}
    for i in range(int(sys.argv[1]))
]
json.dump(here, sys.stdout)' "$gpus" > "$scratch/machine.json"
while IFS= read -r variable; do
    # Which UCX is for Python to say.
    case $variable in CUDA_CLUSTER_UCX=*) ;; *) export "${variable?}" ;; esac
done < <(target/debug/examples/fake-machine "$scratch/machine.json" "$scratch/machine")
export XDG_RUNTIME_DIR=$scratch PYTHONPATH=$root/python:$root/tests/python PATH=${PYTHON%/*}:$PATH
unset CUDA_VISIBLE_DEVICES
cd "$scratch"
"$@"
