"""A rank waits for the signal of its own interval timer."""

import signal

from team import RANK, Star

signal.signal(signal.SIGALRM, lambda *_: None)
star = Star()
while True:
    if RANK == 2:
        signal.setitimer(signal.ITIMER_REAL, 10)
        signal.pause()
    star.barrier()
