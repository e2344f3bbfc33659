"""A rank waits for a semaphore that its child releases after 10 s of computing."""

import multiprocessing
import time

from team import RANK, Star


def computes(done):
    while True:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sum(range(10000))
        done.release()


if __name__ == "__main__":
    star = Star()
    done = multiprocessing.Semaphore(0)
    if RANK == 0:
        multiprocessing.Process(target=computes, args=(done,), daemon=True).start()
    while True:
        if RANK == 0:
            done.acquire()
        star.barrier()
