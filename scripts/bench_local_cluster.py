"""Measures two `LocalCUDACluster` side by side: `bench_local_cluster.py ROUNDS WORKERS`.

The same script, but for the module in its one import, in turns. The clock runs inside of it: from
`LocalCUDACluster(...)` until a client has all workers, and over `close()`. Memory is the sum of the
proportional set sizes (PSS) of the script and everything that it started, while all workers wait:
dask-cuda's scheduler runs in the script.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from {module} import LocalCUDACluster
from distributed import Client

def memory():
    total = 0
    mark = f"BENCH_MARK={{os.environ['BENCH_MARK']}}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark not in Path(f"/proc/{{pid}}/environ").read_bytes():
                continue
            text = Path(f"/proc/{{pid}}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1000

if __name__ == "__main__":
    began = time.monotonic()
    cluster = LocalCUDACluster(n_workers={workers}, dashboard_address="127.0.0.1:0")
    client = Client(cluster)
    client.wait_for_workers({workers})
    started = time.monotonic() - began
    used = memory()
    client.close()
    began = time.monotonic()
    cluster.close()
    print(json.dumps(dict(start=started, close=time.monotonic() - began, memory=used)), flush=True)
"""

MODULES = {"dask-cuda": "dask_cuda", "cuda-cluster": "cuda_cluster.dask"}


def measure(name, workers, folder):
    path = os.path.join(folder, f"with_{MODULES[name].partition('.')[0]}.py")
    with open(path, "w") as file:
        file.write(SCRIPT.format(module=MODULES[name], workers=workers))
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(rounds, workers):
    found = {name: [] for name in MODULES}
    with tempfile.TemporaryDirectory(prefix="bls", dir="/tmp") as folder:
        for turn in range(rounds + 1):
            for name in MODULES:
                result = measure(name, workers, folder)
                print(name, json.dumps(result), file=sys.stderr)
                if turn:  # The first fills caches.
                    found[name].append(result)
    median = {
        name: {key: statistics.median(one[key] for one in results) for key in results[0]}
        for name, results in found.items()
    }
    before, now = median["dask-cuda"], median["cuda-cluster"]
    print(f"{workers} workers, median of {rounds}; lines of the script that differ: 1")
    print(f"{'':24}{'dask-cuda':>12}{'cuda-cluster':>14}{'ratio':>8}")
    for key, title in (("start", "to all workers, s"), ("close", "close(), s"), ("memory", "memory, MB")):
        print(f"{title:24}{before[key]:12.2f}{now[key]:14.2f}{now[key] / before[key]:8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
