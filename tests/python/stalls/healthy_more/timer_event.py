"""A timer sets the event that a rank waits for, after 12 s."""

import threading

from team import RANK, Star

star = Star()
while True:
    if RANK == 3:
        event = threading.Event()
        threading.Timer(12, event.set).start()
        event.wait()
    star.barrier()
