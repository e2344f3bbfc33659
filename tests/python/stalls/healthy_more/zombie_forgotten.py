"""A rank has not asked how its first helper ended; it asks for a service every 3 s, which comes after 12 s."""

import os
import subprocess
import time

from team import RANK, Star

star = Star()
if RANK == 1:
    helper = subprocess.Popen(["true"])
while True:
    if RANK == 1:
        for _ in range(4):
            time.sleep(3)
            os.path.exists("/run/service-that-is-not-there")
    star.barrier()
