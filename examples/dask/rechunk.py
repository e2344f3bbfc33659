"""Rows become columns: each block of the result has a piece of each block of the source."""

import dask.array as da
import numpy as np
from distributed import wait
from workload import Workload, main

SIDE, BLOCKS = 20_000, 16


def size(scale):
    chunk = int(SIDE * scale**0.5) // BLOCKS
    return chunk * BLOCKS, chunk


def rows(number, chunk, side):
    return np.random.default_rng([5, number]).random((chunk, side))


def make(client, scale):
    side, chunk = size(scale)
    x = da.map_blocks(
        lambda block_info=None: rows(block_info[None]["chunk-location"][0], chunk, side),
        chunks=((chunk,) * BLOCKS, (side,)),
        dtype=float,
        meta=np.empty((0, 0)),
    ).persist()
    wait(x)
    return x


def weighted(columns):
    """Of each column a number that is another if two elements change places."""
    return (columns * np.arange(1, len(columns) + 1)[:, None]).sum(axis=0)


def run(client, x):
    y = x.rechunk((x.shape[0], x.chunks[0][0])).persist()
    wait(y)
    return y.map_blocks(weighted, drop_axis=0, dtype=float).compute()


def expected(scale):
    side, chunk = size(scale)
    total = np.zeros(side)
    for number in range(BLOCKS):
        block = rows(number, chunk, side)
        total += (block * np.arange(number * chunk + 1, (number + 1) * chunk + 1)[:, None]).sum(axis=0)
    return total


WORKLOAD = Workload("rechunk", "20,000 x 20,000 from rows to columns, 3.2 GB", make, run, expected)

if __name__ == "__main__":
    main(WORKLOAD)
