"""A thread puts something into the queue of its rank every 10 s."""

import queue
import threading
import time

from team import RANK, Ring

items = queue.Queue()


def produce():
    while True:
        time.sleep(10)
        items.put(1)


ring = Ring()
if RANK == 2:
    threading.Thread(target=produce, daemon=True).start()
while True:
    if RANK == 2:
        items.get()
    ring.barrier()
