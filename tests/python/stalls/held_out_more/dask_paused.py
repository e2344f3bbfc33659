"""Frames that a worker keeps beside Dask's back fill its memory: it takes no more tasks, and the next one is for it."""

import os
import time

import psutil
from distributed import Client, get_worker


def cache_frames(limit):
    frames, process = [], psutil.Process()
    while process.memory_info().rss < 0.88 * limit:
        frames.append(b"x" * (1 << 20))
    get_worker().frames = frames


def score(i):
    return i


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    address, worker = next((a, w) for a, w in workers.items() if w["name"] == "gpu3")
    client.submit(cache_frames, worker["memory_limit"], workers=[address]).result()
    time.sleep(2)  # until the worker has looked at its memory
    client.submit(score, 1, workers=[address]).result()
