"""Tasks take a lock of the cluster in turn, and have it for 5 s each."""

import os
import time

from distributed import Client, Lock


def work(i):
    with Lock("output"):
        time.sleep(5)


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        client.gather([client.submit(work, i, pure=False) for i in range(4)])
