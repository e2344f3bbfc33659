"""What bench_tasks_dask.py and bench_tasks_ray.py share: arguments, turns, and what is printed."""

import argparse
import json
import statistics
import time


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def report(version, asked, run):
    """Calls `run`, which runs that many tasks in its n-th turn, and prints one JSON object: tasks
    per second of the median turn. The first turn warms everything up."""
    rates = []
    for turn in range(asked.runs + 1):
        start = time.perf_counter()
        results = run(turn, asked.count)
        rates.append(asked.count / (time.perf_counter() - start))
        # Not while the clock runs.
        del results
    rate = statistics.median(rates[1:])
    print(json.dumps({"version": version, "tasks_per_second": rate, "runs": rates[1:]}))
