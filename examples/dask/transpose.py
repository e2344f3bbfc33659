"""x + x.T, as in "Experiments in High Performance Networking with UCX and DGX" (2019): each block meets
the one across the diagonal, which is on another worker."""

import dask.array as da
import numpy as np
from distributed import wait
from workload import Workload, main

#: 128 MiB of float64.
SIDE, CHUNK = 40_000, 4_096


def size(scale):
    """Side and chunk: as many chunks as in the article."""
    return int(SIDE * scale**0.5), max(1, int(CHUNK * scale**0.5))


def edges(side, chunk):
    return [min(chunk, side - at) for at in range(0, side, chunk)]


def block(row, column, shape):
    return np.random.default_rng([2, row, column]).random(shape)


def weighted(block, row, column):
    """A number that is another if an element is, or two change places."""
    return np.array([[(block.ravel() @ np.arange(1, block.size + 1)) * (row * 1000 + column + 1)]])


def make(client, scale):
    side, chunk = size(scale)
    chunks = tuple(edges(side, chunk))

    def one(block_info=None):
        place = block_info[None]["chunk-location"]
        return block(*place, block_info[None]["chunk-shape"])

    x = da.map_blocks(one, chunks=(chunks, chunks), dtype=float, meta=np.empty((0, 0))).persist()
    wait(x)
    return x


def run(client, x):
    y = client.persist(x + x.T)
    wait(y)
    one = lambda block, block_info=None: weighted(block, *block_info[0]["chunk-location"])
    return y.map_blocks(one, chunks=(1, 1), dtype=float).sum().compute()


def expected(scale):
    lengths = edges(*size(scale))
    total = 0.0
    for row, height in enumerate(lengths):
        for column, width in enumerate(lengths):
            mirrored = block(column, row, (width, height)).T
            total += weighted(block(row, column, (height, width)) + mirrored, row, column)[0, 0]
    return total


WORKLOAD = Workload("x + x.T", "40,000 x 40,000 in chunks of 128 MiB, 12.8 GB", make, run, expected)

if __name__ == "__main__":
    main(WORKLOAD)
