"""Failed downloads do not give back their place, so that the next one never gets one."""

import threading

from team import RANK, Star

places = threading.BoundedSemaphore(2)


def fetch_shard(i):
    places.acquire()
    if i % 2:
        raise OSError("404")
    places.release()


def load(i):
    try:
        fetch_shard(i)
    except OSError:
        return None


star = Star()
for i in range(12):
    if RANK == 2:
        load(i)
    star.barrier()
