"""A task that is a coroutine waits, in the worker's event loop, for what that loop was to do."""

import asyncio
import os
import threading

from distributed import Client


async def settle():
    done = threading.Event()
    asyncio.get_running_loop().call_later(0.1, done.set)
    done.wait()


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    client.submit(settle, workers=[names["gpu2"]]).result()
