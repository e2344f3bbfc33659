"""The processes of a pool wait for 12 s each."""

import multiprocessing
import time

from team import RANK, Star


def work(i):
    time.sleep(12)


if __name__ == "__main__":
    star = Star()
    pool = multiprocessing.Pool(2) if RANK == 3 else None
    while True:
        if pool:
            pool.map(work, range(2))
        star.barrier()
