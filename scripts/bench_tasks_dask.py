"""Tasks that do nothing, on dask.distributed: the counterpart of `cuda-cluster bench tasks`.

Prints one JSON object: tasks per second of the median run.
"""

import argparse
import json
import statistics
import time

import distributed
from distributed import Client, LocalCluster, wait


def noop(_):
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    cluster = LocalCluster(
        n_workers=arguments.workers, threads_per_worker=1, dashboard_address=None
    )
    with cluster, Client(cluster) as client:
        rates = []
        for run in range(arguments.runs + 1):
            start = time.perf_counter()
            futures = client.map(noop, range(arguments.count), key=f"noop-{run}")
            wait(futures)
            rates.append(arguments.count / (time.perf_counter() - start))
            del futures
        # The first run warms everything up.
        rate = statistics.median(rates[1:])
    said = {"version": distributed.__version__, "tasks_per_second": rate, "runs": rates[1:]}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
