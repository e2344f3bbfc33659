"""One of eight ranks computes for 9 s in each step."""

import time

from team import RANK, Star

star = Star()
while True:
    if RANK == 6:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            sum(range(10000))
    star.barrier()
