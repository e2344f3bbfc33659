"""A rank asks every half second whether its child has ended, which computes for 10 s."""

import subprocess
import sys
import time

from team import RANK, Star

WORK = "import time; end = time.monotonic() + 10\nwhile time.monotonic() < end: sum(range(10000))"
star = Star()
while True:
    if RANK == 0:
        child = subprocess.Popen([sys.executable, "-c", WORK])
        while child.poll() is None:
            time.sleep(0.5)
    star.barrier()
