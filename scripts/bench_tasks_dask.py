"""Tasks that do nothing, on dask.distributed: the counterpart of `cuda-cluster bench tasks`."""

import bench_tasks
import distributed
from distributed import Client, LocalCluster, wait


def noop(_):
    return None


def main() -> None:
    asked = bench_tasks.arguments()
    cluster = LocalCluster(n_workers=asked.workers, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:

        def run(turn, count):
            futures = client.map(noop, range(count), key=f"noop-{turn}")
            wait(futures)
            return futures

        bench_tasks.report(distributed.__version__, asked, run)


if __name__ == "__main__":
    main()
