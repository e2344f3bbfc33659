"""An executor of four processes, of which one computes for 11 s and the others have nothing to do."""

import concurrent.futures
import time

from team import RANK, Star


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


if __name__ == "__main__":
    star = Star()
    if RANK == 0:
        pool = concurrent.futures.ProcessPoolExecutor(4)
    while True:
        if RANK == 0:
            list(pool.map(compute, (11, 0.1, 0.1, 0.1)))
        star.barrier()
