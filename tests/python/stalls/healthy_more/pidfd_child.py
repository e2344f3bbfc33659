"""A rank polls the descriptor of its child, which computes for 10 s."""

import os
import select
import subprocess
import sys

from team import RANK, Star

WORK = "import time; end = time.monotonic() + 10\nwhile time.monotonic() < end: sum(range(10000))"
star = Star()
while True:
    if RANK == 2:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        watch = os.pidfd_open(child.pid)
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.poll()
        os.close(watch)
        child.wait()
    star.barrier()
