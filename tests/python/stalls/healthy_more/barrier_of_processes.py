"""A rank meets its two children at a barrier of processes; one of them computes for 9 s."""

import multiprocessing
import time

from team import RANK, Star


def child(meeting, slow):
    while True:
        end = time.monotonic() + 9
        while slow and time.monotonic() < end:
            sum(range(10000))
        meeting.wait()


if __name__ == "__main__":
    star = Star()
    meeting = multiprocessing.Barrier(3)
    if RANK == 1:
        for slow in (True, False):
            multiprocessing.Process(target=child, args=(meeting, slow), daemon=True).start()
    while True:
        if RANK == 1:
            meeting.wait()
        star.barrier()
