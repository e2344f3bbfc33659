"""A task puts more into a queue of the cluster than it holds, and the client takes nothing before the task is done."""

import os

from distributed import Client, Queue


def publish(count):
    frames = Queue("frames", maxsize=3)
    for i in range(count):
        frames.put(i)


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    frames = Queue("frames", maxsize=3)
    client.submit(publish, 10, workers=[names["gpu1"]]).result()
    print([frames.get() for _ in range(10)])
