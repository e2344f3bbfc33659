"""The queue of a manager is empty and nobody is left who would fill it."""

import multiprocessing

from team import RANK, Star


def feed(queue):
    for i in range(10):
        queue.put(i)


def next_batch(queue):
    return queue.get()


if __name__ == "__main__":
    star = Star()
    if RANK == 2:
        manager = multiprocessing.Manager()
        queue = manager.Queue()
        feeder = multiprocessing.Process(target=feed, args=(queue,))
        feeder.start()
    for step in range(20):
        star.all_gather(next_batch(queue) if RANK == 2 else step)
