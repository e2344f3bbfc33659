"""A rank waits at a queue for its child, which puts something into it every 9 s."""

import multiprocessing
import time

from team import RANK, Star


def produce(queue):
    while True:
        time.sleep(9)
        queue.put("batch")


if __name__ == "__main__":
    star = Star()
    queue = multiprocessing.Queue()
    if RANK == 1:
        multiprocessing.Process(target=produce, args=(queue,), daemon=True).start()
    while True:
        if RANK == 1:
            queue.get()
        star.barrier()
