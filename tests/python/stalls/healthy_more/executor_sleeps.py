"""A ProcessPoolExecutor whose tasks wait for 10 s."""

import time
from concurrent.futures import ProcessPoolExecutor

from team import RANK, Ring


def work(i):
    time.sleep(10)


if __name__ == "__main__":
    ring = Ring()
    pool = ProcessPoolExecutor(2) if RANK == 1 else None
    while True:
        if pool:
            list(pool.map(work, range(2)))
        ring.barrier()
