"""A worker of a pool is killed, as when memory is short; what it had taken never comes back."""

import multiprocessing
import os
import signal

from team import RANK, Files


def clean(i):
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return i * i


def preprocess():
    with multiprocessing.Pool(2) as pool:
        return pool.map(clean, range(8), chunksize=1)


if __name__ == "__main__":
    files = Files()
    files.barrier()
    if RANK == 0:
        preprocess()
    files.barrier()
