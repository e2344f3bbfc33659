"""A cluster with nothing to do: its client thinks."""

import time
import os

from distributed import Client

if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        client.submit(sum, [1, 2], pure=False).result()
        time.sleep(25)
