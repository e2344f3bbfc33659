"""A rank waits at a manager's queue for its child, which computes for 9 s for each entry."""

import multiprocessing
import time

from team import RANK, Star


def produce(queue):
    while True:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            sum(range(10000))
        queue.put("batch")


if __name__ == "__main__":
    star = Star()
    if RANK == 2:
        manager = multiprocessing.Manager()
        queue = manager.Queue()
        multiprocessing.Process(target=produce, args=(queue,), daemon=True).start()
    while True:
        if RANK == 2:
            queue.get()
        star.barrier()
