"""A process is killed, as when memory is short, while it has the lock that all processes of a rank share."""

import multiprocessing
import os
import signal

from crew import RANK, Counters


def summarize(lock):
    with lock:
        os.kill(os.getpid(), signal.SIGKILL)


def merge_results(lock):
    with lock:
        return 1


if __name__ == "__main__":
    counters = Counters()
    counters.meet()
    if RANK == 3:
        lock = multiprocessing.Lock()
        child = multiprocessing.Process(target=summarize, args=(lock,))
        child.start()
        child.join()
        merge_results(lock)
    counters.meet()
