"""A pool of four processes, of which one waits for 11 s and the others have nothing to do."""

import multiprocessing
import time

from team import RANK, Star

if __name__ == "__main__":
    star = Star()
    if RANK == 0:
        pool = multiprocessing.Pool(4)
    while True:
        if RANK == 0:
            pool.map(time.sleep, (11, 0.1, 0.1, 0.1), chunksize=1)
        star.barrier()
