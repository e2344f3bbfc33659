"""The ranks build into one cache, one after another, 5 s each, under a lock of its file."""

import fcntl
import os
import tempfile
import time

from team import PORT, Star

star = Star()
path = os.path.join(tempfile.gettempdir(), f"healthy-{PORT}.lock")
while True:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            sum(range(10000))
    star.barrier()
