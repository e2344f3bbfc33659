#!/usr/bin/env bash
# What supervision costs and how fast it heals: a cluster of eight simulated native workers.
# Prints the supervisor's resident memory against the limit of 10 MiB, its wake-ups at rest, and the
# time from the death of a worker (kill -9) to its being READY again.
# usage: scripts/bench-supervise.sh [DEATHS]     CUDA_CLUSTER names the program
# Eight deaths by default, one of each worker: the restart policy delays one that dies again soon.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=${CUDA_CLUSTER:-target/release/cuda-cluster}
if [ ! -x "$program" ]; then
    echo "$program is missing; build it with: cargo build --release --locked" >&2
    exit 2
fi
exec python3 - "$program" "${1:-8}" <<'PYTHON'
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

program, deaths = sys.argv[1], int(sys.argv[2])
name = f"bench-supervise-{os.getpid()}"


def run(*arguments):
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def state():
    return json.loads(run("ps", name, "-o", "json"))


def field(pid, key):
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith(key + ":"))
    return int(line.split()[1])


def back(worker, before):
    """Milliseconds from a worker's SIGKILL to READY, by the clock of this program."""
    began = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    while True:
        now = state()["workers"][worker]
        if now["restarts"] > before["restarts"] and now["state"] == "ready":
            return now, (time.monotonic() - began) * 1e3
        time.sleep(0.002)


run("up", "--topology", "dgx-h100", "--simulate", "--name", name, "--detach")
try:
    supervisor = state()["supervisor_pid"]
    time.sleep(3)
    wakes = field(supervisor, "voluntary_ctxt_switches")
    resident = field(supervisor, "VmRSS")
    time.sleep(10)
    wakes = field(supervisor, "voluntary_ctxt_switches") - wakes
    print(f"supervisor at rest: {resident / 1024:.1f} MiB resident, {resident / 10240:.2f} of 10 MiB;"
          f" {wakes} wake-ups in 10 s")
    took, own = [], []
    for death in range(deaths):
        worker = death % 8
        now, ms = back(worker, state()["workers"][worker])
        took.append(ms)
        own.append(now["timings"]["ready_ms"])
    print(f"killed to READY, seen from outside: median {statistics.median(took):.0f} ms,"
          f" longest {max(took):.0f} ms, of {deaths}")
    print(f"of that from spawning to READY: median {statistics.median(own):.0f} ms,"
          f" {statistics.median(own) / statistics.median(took):.2f} of it")
finally:
    left = state()["run_directory"]
    run("down", name)
    # Remove the crash bundles of the killed workers.
    shutil.rmtree(left, ignore_errors=True)
PYTHON
