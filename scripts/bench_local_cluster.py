"""Measures clusters of Dask side by side: `bench_local_cluster.py ROUNDS WORKERS...`.

The same script, but for its one import, in turns: dask-cuda's `LocalCUDACluster`, ours, and
`distributed`'s `LocalCluster` with as many processes. The clock runs inside of it: from the class
until a client has all workers, and over `close()`. Memory, while all workers wait, of the script and
everything that it started: the sum of the proportional set sizes (PSS), and what the median worker
has for itself (private pages). The others' schedulers run in the script.

A candidate that fails is a line of its own, with its last words, and has no figures.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import json, os, statistics, sys, time
from pathlib import Path
from {module} import {name} as Cluster
from distributed import Client

def sizes(pid):
    text = Path(f"/proc/{{pid}}/smaps_rollup").read_text()
    pairs = [line.split()[:2] for line in text.splitlines()[1:]]
    return {{key.rstrip(":"): int(value) / 1000 for key, value in pairs}}

def memory():
    mark = f"BENCH_MARK={{os.environ['BENCH_MARK']}}".encode()
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{{pid}}/environ").read_bytes():
                total += sizes(pid)["Pss"]
        except OSError:
            continue
    return total

def private(pids):
    found = [sizes(pid) for pid in pids]
    return statistics.median(one["Private_Clean"] + one["Private_Dirty"] for one in found)

if __name__ == "__main__":
    began = time.monotonic()
    cluster = Cluster(n_workers={workers}, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    client = Client(cluster)
    client.wait_for_workers({workers}, timeout=600)
    started = time.monotonic() - began
    used = dict(memory=memory(), private=private(client.run(os.getpid).values()))
    client.close()
    began = time.monotonic()
    cluster.close()
    print(json.dumps(dict(start=started, close=time.monotonic() - began, **used)), flush=True)
"""

CANDIDATES = {
    "LocalCluster": ("distributed", "LocalCluster"),
    "dask-cuda": ("dask_cuda", "LocalCUDACluster"),
    "cuda-cluster": ("cuda_cluster.dask", "LocalCUDACluster"),
}

ROWS = (
    ("start", "to all workers, s"),
    ("close", "close(), s"),
    ("memory", "memory, MB"),
    ("private", "of a worker alone, MB"),
)


def measure(name, workers, folder):
    module, of = CANDIDATES[name]
    path = os.path.join(folder, f"with_{name.replace('-', '_')}.py")
    with open(path, "w") as file:
        file.write(SCRIPT.format(module=module, name=of, workers=workers))
    environment = {
        **os.environ,
        "BENCH_MARK": f"{name}-{os.getpid()}",
        "XDG_RUNTIME_DIR": folder,
        # A made-up driver has no sensors worth reading.
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
        # Both may spill only what a GPU has; there is none that RMM could use.
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, path]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return {"failed": "it did not end within 900 s"}
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": words[-1] if words else f"exit {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def main(rounds, workers):
    found = {name: [] for name in CANDIDATES}
    with tempfile.TemporaryDirectory(prefix="bls", dir="/tmp") as folder:
        for turn in range(rounds + 1):
            for name, results in found.items():
                if results and "failed" in results[-1]:
                    continue
                result = measure(name, workers, folder)
                print(name, json.dumps(result), file=sys.stderr)
                if turn or "failed" in result:  # The first fills caches.
                    results.append(result)
    median = {}
    for name, results in found.items():
        if "failed" in results[-1]:
            print(f"{name} with {workers} workers: {results[-1]['failed']}")
        else:
            median[name] = {key: statistics.median(one[key] for one in results) for key in results[0]}
    if "cuda-cluster" not in median:
        sys.exit(1)
    print(f"{workers} workers, median of {rounds}; lines of the script that differ: 1")
    rivals = [name for name in median if name != "cuda-cluster"]
    print(f"{'':24}{'cuda-cluster':>14}" + "".join(f"{name:>14}{'ratio':>8}" for name in rivals))
    for key, title in ROWS:
        now = median["cuda-cluster"][key]
        others = "".join(f"{median[name][key]:14.2f}{now / median[name][key]:8.2f}" for name in rivals)
        print(f"{title:24}{now:14.2f}{others}")


if __name__ == "__main__":
    for count in sys.argv[2:]:
        main(int(sys.argv[1]), int(count))
