"""Tasks submit tasks to their own worker and wait for them with `result`, when no thread is left to run those."""

import os

from distributed import Client, get_client, get_worker


def leaf(i):
    return i


def outer(i):
    here = get_worker().address
    return get_client().submit(leaf, i, pure=False, workers=[here]).result()


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    tasks = [
        client.submit(outer, i, pure=False, workers=[address])
        for address, threads in client.nthreads().items()
        for i in range(threads)
    ]
    client.gather(tasks)
