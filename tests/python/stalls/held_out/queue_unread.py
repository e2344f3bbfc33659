"""A rank joins the process that fills a queue before it has read the queue."""

import multiprocessing

from team import RANK, Ring


def produce(queue):
    for i in range(64):
        queue.put(bytes(65536 + i))


def tokenize():
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=produce, args=(queue,))
    child.start()
    child.join()
    return [queue.get() for _ in range(64)]


if __name__ == "__main__":
    ring = Ring()
    for step in range(100):
        if RANK == 3 and step == 5:
            tokenize()
        ring.all_reduce(step)
