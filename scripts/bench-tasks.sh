#!/usr/bin/env bash
# Empty tasks: the native engine compared with dask.distributed, two workers each, in one run.
# PYTHON names a Python that has `distributed` (default: the one of .venv).
set -euo pipefail
cd "$(dirname "$0")/.."

count=${COUNT:-100000}
python=${PYTHON:-.venv/bin/python}
binary=${BINARY:-target/release/cuda-cluster}
[ -x "$binary" ] || cargo build --release --quiet

name=bench-tasks-$$
"$binary" up --topology dgx-1-v100 --simulate --n-workers 2 --name "$name" --detach >/dev/null
trap '"$binary" down "$name" >/dev/null' EXIT

native=$("$binary" bench tasks "$name" --count "$count" -o json)
dask=$("$python" scripts/bench_tasks_dask.py --workers 2)
# Once more, because a machine's speed changes during the measurement.
again=$("$binary" bench tasks "$name" --count "$count" -o json)

NATIVE=$native AGAIN=$again DASK=$dask "$python" - <<'PYTHON'
import json, os
dask = json.loads(os.environ["DASK"])["tasks_per_second"]
print(f"{'dask.distributed':24} {dask:12.0f} tasks/s")
for which in ("NATIVE", "AGAIN"):
    for run in json.loads(os.environ[which])["runs"]:
        rate = run["per_second"]
        print(f"{'native, ' + run['shape']:24} {rate:12.0f} tasks/s  {rate / dask:8.0f} times")
PYTHON
