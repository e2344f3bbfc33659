"""Tasks ask a service at a limited rate: each sleeps for 9 s before it answers."""

import os
import time

from distributed import Client


def ask(number):
    time.sleep(9)
    return number


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        client.gather(client.map(ask, range(4), pure=False))
