"""A task waits, as it should, with `worker_client` for tasks that take 8 s."""

import os
import time

from distributed import Client, worker_client


def leaf(i):
    time.sleep(8)
    return i


def outer():
    with worker_client() as client:
        return client.gather(client.map(leaf, range(2), pure=False))


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        client.submit(outer, pure=False).result()
