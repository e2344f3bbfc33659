"""A child sends large objects through a pipe."""

import multiprocessing

from team import RANK, Ring


def make(link):
    while True:
        link.send([list(range(2_000_000)), bytes(50 << 20)])


if __name__ == "__main__":
    ring = Ring()
    if RANK == 1:
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=make, args=(theirs,), daemon=True).start()
    while True:
        if RANK == 1:
            for _ in range(5):
                ours.recv()
        ring.barrier()
