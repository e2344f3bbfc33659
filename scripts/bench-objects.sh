#!/usr/bin/env bash
# Objects of 64 MiB and 1 GiB that one worker makes and another reads, on one machine: the native
# engine, Ray, `ucx_perftest` and memcpy, in turns on the same CPUs.
#
# Milliseconds: `make` until the object is stored with the first worker, `look` until a task of the
# second one has it (nothing is read), `read` until that one has read each word. Medians: the first
# turn of each size, in which memory is new to the workers, and the others. Where it is new to a
# virtual machine, too, both can take seconds. memcpy is one thread's, between arrays that exist.
#
#   scripts/bench-objects.sh           after scripts/setup.sh --rivals, which installs Ray
#   CPUS=0,1 TURNS=5 ROUNDS=3          where, how many objects, how often all of it
#
# Ends with 2 if a program to compare with is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv-rivals/bin/python}
cpus=${CPUS:-0,1}
export TURNS=${TURNS:-5}
rounds=${ROUNDS:-3}

"$python" -c 'import ray' 2>/dev/null || {
    echo "missing: ray in $python (scripts/setup.sh --rivals)" >&2
    exit 2
}
command -v ucx_perftest >/dev/null || {
    echo "missing: ucx_perftest (apt-get install ucx-utils)" >&2
    exit 2
}
program=$(scripts/built.sh bench objects)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XDG_RUNTIME_DIR=$scratch

# shellcheck source=scripts/perftest.sh
source scripts/perftest.sh

# message SIZE: milliseconds of a message over shared memory.
message() {
    local rate
    rate=$(UCX_TLS=sm,self perftest ucp_am_bw "$1" 10)
    [[ -n $rate ]] || {
        echo "missing: a figure of ucx_perftest for $1 bytes" >&2
        exit 2
    }
    awk -v size="$1" -v rate="$rate" 'BEGIN {
        printf "{\"bytes\": %d, \"message\": %f}\n", size, size / 1048576 / rate * 1000}'
}

memcpy='import json, time, numpy
for size in (64 << 20, 1 << 30):
    a, b = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)
    for _ in range(5):
        start = time.perf_counter()
        numpy.copyto(b, a)
        print(json.dumps({"bytes": size, "memcpy": 1e3 * (time.perf_counter() - start)}))'

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    taskset -c "$cpus" "$program" >>"$scratch/native"
    taskset -c "$cpus" "$python" scripts/bench_objects_ray.py --turns "$TURNS" >>"$scratch/ray"
    for size in $((64 << 20)) $((1 << 30)); do message "$size" >>"$scratch/ucx_perftest"; done
    taskset -c "${cpus%,*}" "$python" -c "$memcpy" >>"$scratch/memcpy"
done

ucx_info -v 2>/dev/null | sed -n 's/^# Library version: /ucx_perftest /p'
"$python" - "$scratch" <<'PYTHON'
import json, pathlib, statistics, sys

import numpy, ray

print(f"Ray {ray.__version__}, numpy {numpy.__version__}")
scratch = pathlib.Path(sys.argv[1])
found = {}
for name in ("native", "ray", "ucx_perftest", "memcpy"):
    before = None
    for line in (scratch / name).read_text().splitlines():
        row = json.loads(line)
        size = row.pop("bytes")
        first = size != before and name in ("native", "ray")
        before = size
        for step, millis in row.items():
            found.setdefault((size, name, step, first), []).append(millis)
for size in (64 << 20, 1 << 30):
    median = {key[1:]: statistics.median(all) for key, all in found.items() if key[0] == size}
    print(f"\n{size >> 20} MiB, ms         first    again")
    for name, step, first in median:
        if first:
            print(f"{name:8} {step:8} {median[name, step, True]:8.1f} {median[name, step, False]:8.1f}")
    alone = {"message": "ucx_perftest", "memcpy": "memcpy"}
    for step, name in alone.items():
        print(f"{name:17} {'':8} {median[name, step, False]:8.1f}")
    for step in ("make", "look", "read"):
        ratio = median["ray", step, False] / median["native", step, False]
        print(f"{step}: {ratio:.2f} of Ray's speed")
    parts = [sum(median[n, s, False] for s in ("make", "look", "read")) for n in ("ray", "native")]
    print(f"made, moved and read: {parts[0] / parts[1]:.2f} of Ray's speed")
PYTHON
