"""The workloads of `examples/dask` on clusters of three launchers; see workloads.sh.

Each has a new cluster for each workload, with as many workers of one thread; whose turn it is first
changes. Memory is the sum of the workers' peaks while they compute; `moved` are bytes that workers got from
each other; `disk` those that they wrote, spills and p2p's. A result that is not that of the same work without Dask is an
error, and so is a candidate that does not come to its end.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("svd", "transpose", "merge", "groupby", "rechunk", "boosting", "grid_search", "taxi", "futures")

#: Shares of the whole sizes that fit a machine with two CPUs and 24 GiB within a minute or two each.
SCALES = {
    "svd": 0.1, "transpose": 0.1, "merge": 0.1, "groupby": 0.1, "rechunk": 0.25, "boosting": 0.05,
    "grid_search": 0.05, "taxi": 0.05, "futures": 0.2,
}  # fmt: skip

#: Class, module, and what it is called with.
CANDIDATES = {
    "LocalCluster": ("distributed", "LocalCluster", {}),
    "dask-cuda": ("dask_cuda", "LocalCUDACluster", {}),
    "ours, tcp": ("cuda_cluster.dask", "LocalCUDACluster", {"protocol": "tcp"}),
    "ours, direct": ("cuda_cluster.dask", "LocalCUDACluster", {"protocol": "direct"}),
}


def one(name, scale, candidate, workers, limit):
    """What one candidate says of one workload, in this process."""
    from distributed import Client

    sys.path.insert(0, str(ROOT / "examples/dask"))
    import cloudpickle

    module = importlib.import_module(name)
    # Workers have no examples.
    cloudpickle.register_pickle_by_value(module)
    work = module.WORKLOAD
    package, kind, options = CANDIDATES[candidate]
    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, **options}
    if limit:
        options["memory_limit"] = limit
    if package == "cuda_cluster.dask" and not has_gpus():
        options |= {"topology": "dgx-1-v100", "simulate": True}
    # Another process imports this file, too.
    with getattr(importlib.import_module(package), kind)(**options) as cluster, Client(cluster) as client:
        client.wait_for_workers(workers)
        data = work.make(client, scale)
        client.run(_begin)
        began = time.perf_counter()
        found = work.run(client, data)
        took = time.perf_counter() - began
        counted = list(client.run(_counted).values())
        del data
        gc.collect()
    expected = work.expected(scale)
    work.check(found, expected)
    return {"took": took, **{part: sum(one[part] for one in counted) for part in counted[0]}}


def has_gpus():
    with contextlib.suppress(OSError):
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    return False


def _begin(dask_worker):
    # Linux: the peak is from now on.
    Path("/proc/self/clear_refs").write_text("5")
    dask_worker.transfer_incoming_log.clear()
    dask_worker.written_before = _written()


def _written():
    """Bytes that this process has written to disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"]) - int(lines["cancelled_write_bytes"])


def _counted(dask_worker):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    # What p2p has sent is not among the transfers.
    by_p2p = sum(
        value
        for name, value in dask_worker.digests_total.items()
        if isinstance(name, tuple) and "background-comms" in name and name[-2:] == ("process", "bytes")
    )
    return {
        "peak": int(line.split()[1]) * 1024,
        "moved": sum(one["total"] for one in dask_worker.transfer_incoming_log) + by_p2p,
        # One that a nanny has ended, for its memory, and started again has no figures of before.
        "disk": _written() - getattr(dask_worker, "written_before", 0),
        "replaced": int(not hasattr(dask_worker, "written_before")),
    }


def asked(name, candidate, options):
    """What a candidate says, from a process of its own; or why it says nothing."""
    scale = SCALES[name] * options.times
    command = [sys.executable, __file__, "--one", name, str(scale), candidate, "--workers", str(options.workers)]
    command += ["--memory-limit", options.memory_limit] if options.memory_limit else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        told, errors = process.communicate(timeout=options.within)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        return {"failed": f"it did not end within {options.within} s"}
    if process.returncode != 0:
        words = [line for line in errors.splitlines() if line.strip()]
        return {"failed": words[-1].strip() if words else f"exit {process.returncode}"}
    return json.loads(told.splitlines()[-1])


def table(options):
    failed = False
    limit = f", {options.memory_limit} a worker" if options.memory_limit else ""
    print(f"{options.workers} workers of one thread{limit}; medians of {options.turns} turns; each result is right")
    print(f"{'':12}{'scale':>7}  {'':14}{'s':>8}{'ratio':>7}{'peak, GB':>10}{'moved, GB':>11}{'disk, GB':>10}")
    for name in options.only:
        seen = {candidate: [] for candidate in options.candidates}
        for turn in range(options.turns):
            order = options.candidates[turn % len(seen) :] + options.candidates[: turn % len(seen)]
            for candidate in order:
                if not any("failed" in one for one in seen[candidate]):
                    seen[candidate].append(asked(name, candidate, options))
        first = None
        for candidate, all_of_it in seen.items():
            head = f"{name:12}{SCALES[name] * options.times:7g}  {candidate:14}"
            wrong = [one["failed"] for one in all_of_it if "failed" in one]
            if wrong:
                print(f"{head}{wrong[0]}", flush=True)
                # dask-cuda needs GPUs.
                failed |= candidate != "dask-cuda" or has_gpus()
                continue
            median = {part: statistics.median(one[part] for one in all_of_it) for part in all_of_it[0]}
            first = first or median["took"]
            sizes = "".join(f"{median[part] / 1e9:{width}.2f}" for part, width in SIZES)
            replaced = f"  {median['replaced']:g} replaced" if median["replaced"] else ""
            print(f"{head}{median['took']:8.2f}{first / median['took']:7.2f}{sizes}{replaced}", flush=True)
    return failed


SIZES = (("peak", 10), ("moved", 11), ("disk", 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=float, default=1, help="the sizes, times this")
    parser.add_argument("--memory-limit", help="of each worker")
    parser.add_argument("--within", type=float, default=900, help="seconds for one run")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NAMES))
    parser.add_argument("--candidates", type=lambda text: text.split("+"), default=list(CANDIDATES))
    options = parser.parse_args()
    if options.one:
        name, scale, candidate = options.one
        print(json.dumps(one(name, float(scale), candidate, options.workers, options.memory_limit)))
        return 0
    unknown = [name for name in options.only if name not in NAMES]
    unknown += [name for name in options.candidates if name not in CANDIDATES]
    if unknown:
        parser.error(f"there is no {unknown[0]}: workloads are {', '.join(NAMES)}; candidates, with + between them, {' + '.join(CANDIDATES)}")
    with tempfile.TemporaryDirectory(prefix="wl", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = folder
        return int(table(options))


if __name__ == "__main__":
    sys.exit(main())
