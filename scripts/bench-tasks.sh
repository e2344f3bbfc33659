#!/usr/bin/env bash
# Empty tasks: the native engine compared with dask.distributed and with Ray, two workers each, in one
# run. PYTHON names a Python that has `distributed` (default: the one of .venv), RIVALS one that has
# Ray (scripts/setup.sh --rivals).
set -euo pipefail
cd "$(dirname "$0")/.."

count=${COUNT:-100000}
python=${PYTHON:-.venv/bin/python}
rivals=${RIVALS:-.venv-rivals/bin/python}
binary=${BINARY:-target/release/cuda-cluster}
"$rivals" -c 'import ray' 2>/dev/null || {
    echo "missing: ray in $rivals (scripts/setup.sh --rivals)" >&2
    exit 2
}
[ -x "$binary" ] || cargo build --release --quiet

name=bench-tasks-$$
"$binary" up --topology dgx-1-v100 --simulate --n-workers 2 --name "$name" --detach >/dev/null
trap '"$binary" down "$name" >/dev/null' EXIT

native=$("$binary" bench tasks "$name" --count "$count" -o json)
dask=$("$python" scripts/bench_tasks_dask.py --workers 2)
ray=$("$rivals" scripts/bench_tasks_ray.py --workers 2)
# Once more, because a machine's speed changes during the measurement.
again=$("$binary" bench tasks "$name" --count "$count" -o json)

NATIVE=$native AGAIN=$again DASK=$dask RAY=$ray "$python" - <<'PYTHON'
import json, os

rivals = {}
for name in ("dask", "ray"):
    said = json.loads(os.environ[name.upper()])
    rivals[name] = said["tasks_per_second"]
    print(f"{name + ' ' + said['version']:24} {rivals[name]:12.0f} tasks/s")
for which in ("NATIVE", "AGAIN"):
    for run in json.loads(os.environ[which])["runs"]:
        rate = run["per_second"]
        ratios = "  ".join(f"{rate / rival:6.0f} times {name}" for name, rival in rivals.items())
        print(f"{'native, ' + run['shape']:24} {rate:12.0f} tasks/s  {ratios}")
PYTHON
