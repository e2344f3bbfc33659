"""A pool of threads asks a service at a limited rate: each sleeps for 9 s before it answers."""

import time
from concurrent.futures import ThreadPoolExecutor

from team import RANK, Star


def ask(i):
    time.sleep(9)


star = Star()
with ThreadPoolExecutor(3) as pool:
    while True:
        if RANK == 1:
            list(pool.map(ask, range(3)))
        star.barrier()
