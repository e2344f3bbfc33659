"""Tasks of 10 s each, and the results of two are needed by a third."""

import os
import time

from distributed import Client


def work(*_):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        sum(range(10000))


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        parts = [client.submit(work, pure=False) for _ in range(2)]
        client.submit(work, *parts, pure=False).result()
