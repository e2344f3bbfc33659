"""Futures that make futures, an actor that counts, and a lock that guards a file."""

import os
import pathlib
import tempfile

from distributed import Lock, as_completed, wait, worker_client
from workload import Workload, main

TASKS = 5_000


class Counter:
    """An actor: an object on one worker, whose methods run there."""

    def __init__(self):
        self.sum = 0

    def add(self, number):
        self.sum += number
        return self.sum


def one(counter, number):
    counter.add(number).result()
    return number


def tree(low, high):
    """A sum by tasks that make tasks. While one waits, its worker runs others."""
    if high - low <= 64:
        return sum(range(low, high))
    middle = (low + high) // 2
    with worker_client() as client:
        return sum(client.gather([client.submit(tree, low, middle), client.submit(tree, middle, high)]))


def append(path, name, number):
    """Adds to the number in a file: two at a time would lose one."""
    with Lock(name):
        path.write_text(str(int(path.read_text()) + number))


def make(client, scale):
    return max(100, int(TASKS * scale))


def run(client, tasks):
    counter = client.submit(Counter, actor=True).result()
    done = sum(
        future.result()
        for future in as_completed(client.map(lambda number: one(counter, number), range(tasks)))
    )
    summed = client.submit(tree, 0, tasks).result()
    handle, name = tempfile.mkstemp(prefix="futures-")
    os.close(handle)
    path = pathlib.Path(name)
    try:
        path.write_text("0")
        wait(client.map(lambda number: append(path, name, number), range(100)))
        return [done, counter.add(0).result(), summed, int(path.read_text())]
    finally:
        path.unlink()


def expected(scale):
    tasks = make(None, scale)
    return [sum(range(tasks))] * 3 + [sum(range(100))]


WORKLOAD = Workload(
    "futures", "5,000 calls of an actor, a tree of tasks, a lock", make, run, expected, tolerance=0
)

if __name__ == "__main__":
    main(WORKLOAD)
