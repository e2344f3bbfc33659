"""Tasks wait for an event of the cluster, which another task sets after 9 s of computing."""

import os
import time

from distributed import Client, Event


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


def waits(name):
    Event(name).wait()


def sets(name):
    compute(9)
    Event(name).set()


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    step = 0
    while True:
        step += 1
        name = f"step {step}"
        tasks = [client.submit(waits, name, pure=False) for _ in range(3)]
        tasks.append(client.submit(sets, name, pure=False))
        client.gather(tasks)
