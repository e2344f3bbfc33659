"""A client has taken a lock of the cluster and waits for a task that wants it, too."""

import os

from distributed import Client, Lock


def write_block(i):
    with Lock("output"):
        return i


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    lock = Lock("output")
    lock.acquire()
    client.submit(write_block, 1, workers=[names["gpu1"]]).result()
