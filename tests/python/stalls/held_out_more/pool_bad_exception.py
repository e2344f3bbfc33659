"""The exception of a task can't be read by the pool, whose thread for results ends with that."""

import multiprocessing

from crew import RANK, Counters


class BadLine(Exception):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")


def parse(i):
    if i == 3:
        raise BadLine("part-3", 17)
    return i


def parse_shards():
    with multiprocessing.Pool(2) as pool:
        return pool.map(parse, range(8), chunksize=1)


if __name__ == "__main__":
    counters = Counters()
    counters.meet()
    if RANK == 1:
        parse_shards()
    counters.meet()
