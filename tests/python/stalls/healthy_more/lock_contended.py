"""A thread keeps a lock for 8 s while it waits for its next turn; the rank's main thread wants it."""

import threading
import time

from team import RANK, Star

lock = threading.Lock()


def refresh():
    while True:
        with lock:
            time.sleep(8)
        time.sleep(0.1)


star = Star()
if RANK == 1:
    threading.Thread(target=refresh, daemon=True).start()
while True:
    if RANK == 1:
        with lock:
            pass
    star.barrier()
