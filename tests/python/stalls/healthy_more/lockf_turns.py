"""The ranks take a lock on a range of a file in turn; who has it waits 6 s for a licence."""

import fcntl
import os
import tempfile
import time

from team import PORT, RANK, Star

star = Star()
file = open(os.path.join(tempfile.gettempdir(), f"healthy-{PORT}.lock"), "w")
while True:
    fcntl.lockf(file, fcntl.LOCK_EX, 8, 8 * (RANK // 2))
    time.sleep(6)
    fcntl.lockf(file, fcntl.LOCK_UN, 8, 8 * (RANK // 2))
    star.barrier()
