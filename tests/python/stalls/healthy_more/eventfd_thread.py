"""A rank reads from an event's descriptor, which a thread of it signals every 9 s."""

import os
import threading
import time

from team import RANK, Star


def signal():
    while True:
        time.sleep(9)
        os.eventfd_write(event, 1)


star = Star()
event = os.eventfd(0)
if RANK == 3:
    threading.Thread(target=signal, daemon=True).start()
while True:
    if RANK == 3:
        os.eventfd_read(event)
    star.barrier()
