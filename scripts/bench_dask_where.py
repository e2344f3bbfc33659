"""Where the time of Dask's graphs goes: tasks, messages, scheduler, waiting.

Called by scripts/bench-comm.sh --where. For each graph and protocol: the seconds that it took, and
the seconds of CPU of its workers, of that in tasks' own code, and of the scheduler with the client.
The `rest` of the workers' CPU is that of event loops, transport, disk, and of threads beside tasks,
in which p2p takes tables apart. `least` is the time of tasks and scheduler alone, on all of this
machine's CPUs: no transport can be faster than that.
"""

import os
import statistics
import sys
import time

import bench_comm
import psutil


def of_processes(pids):
    used = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in used)


def in_tasks(dask_scheduler):
    """CPU seconds of tasks' threads, and seconds of disk and network, as the workers told them."""
    sums = {"thread-cpu": 0.0, "disk": 0.0, "network": 0.0}
    for name, value in dask_scheduler.cumulative_worker_metrics.items():
        if isinstance(name, tuple) and name[-1] == "seconds":
            for part in sums:
                if name[0] == "execute" and part == "thread-cpu" and str(name[-2]).endswith("-cpu"):
                    sums[part] += value
                elif part != "thread-cpu" and str(name[-2]).startswith(part):
                    sums[part] += value
    return sums


def measure(candidate, workers, turns, names):
    rows = {}
    with bench_comm.cluster_of(candidate, workers) as client:
        pids = list(client.run(os.getpid).values())
        # The scheduler lives in this process, the client too.
        here = os.getpid()
        for name in names:
            seen = []
            for turn in range(-1, turns):
                run = bench_comm.prepared(name)
                time.sleep(1.5)  # workers tell their figures with their heartbeats
                before = client.run_on_scheduler(in_tasks)
                cpu, own = of_processes(pids), of_processes([here])
                began = time.perf_counter()
                run()
                took = time.perf_counter() - began
                cpu, own = of_processes(pids) - cpu, of_processes([here]) - own
                time.sleep(1.5)
                told = client.run_on_scheduler(in_tasks)
                parts = {part: told[part] - before[part] for part in told}
                if turn >= 0:
                    seen.append({"took": took, "workers": cpu, "scheduler": own, **parts})
            rows[name] = {part: statistics.median(one[part] for one in seen) for part in seen[0]}
    return rows


def main():
    workers, turns = int(sys.argv[1]), int(sys.argv[2])
    candidates = sys.argv[3:] or ["tcp", "direct"]
    names = [*bench_comm.GRAPHS, "SVD"]
    cpus = len(os.sched_getaffinity(0))
    found = {candidate: measure(candidate, workers, turns, names) for candidate in candidates}
    print(f"{workers} workers on {cpus} CPUs, medians of {turns} turns; seconds")
    heads = ("took", "workers", "tasks", "rest", "scheduler", "disk", "network", "least")
    print(f"{'':16}{'':8}" + "".join(f"{head:>10}" for head in heads) + f"{'at most':>10}")
    for name in names:
        for candidate in candidates:
            row = found[candidate][name]
            least = (row["thread-cpu"] + row["scheduler"]) / cpus
            figures = (
                row["took"], row["workers"], row["thread-cpu"], row["workers"] - row["thread-cpu"],
                row["scheduler"], row["disk"], row["network"], least,
            )  # fmt: skip
            most = found[candidates[0]][name]["took"] / least
            line = "".join(f"{figure:10.2f}" for figure in figures)
            print(f"{name:16}{candidate:8}{line}{most:9.2f}x")


if __name__ == "__main__":
    main()
