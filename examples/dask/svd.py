"""The singular values of a tall matrix, as in "Experiments in High Performance Networking with UCX and
DGX" (2019): most of the time goes into moving blocks between workers there."""

import dask.array as da
import numpy as np
from distributed import wait
from workload import Workload, main

ROWS, COLUMNS, CHUNK = 1_000_000, 1_000, 10_000


def size(scale):
    """Rows and columns: chunks are as in the article, but for scales with fewer than four of them."""
    chunk = CHUNK if scale >= 4 * CHUNK / ROWS else int(scale * ROWS / 4)
    return chunk, max(4, round(scale * ROWS / chunk)), min(COLUMNS, chunk)


def block(number, chunk, columns):
    return np.random.default_rng([1, number]).random((chunk, columns))


def make(client, scale):
    chunk, blocks, columns = size(scale)
    x = da.map_blocks(
        lambda block_info=None: block(block_info[None]["chunk-location"][0], chunk, columns),
        chunks=((chunk,) * blocks, (columns,)),
        dtype=float,
        meta=np.empty((0, 0)),
    ).persist()
    wait(x)
    return x


def run(client, x):
    u, s, v = da.linalg.svd(x)
    u, s, v = client.persist([u, s, v])
    wait([u, s, v])
    # That u is orthogonal is a part of the result.
    return np.concatenate([s.compute(), da.diag(u.T @ u).compute()])


def expected(scale):
    """The roots of the eigenvalues of x.T @ x."""
    chunk, blocks, columns = size(scale)
    squares = np.zeros((columns, columns))
    for number in range(blocks):
        x = block(number, chunk, columns)
        squares += x.T @ x
    return np.concatenate([np.sqrt(np.linalg.eigvalsh(squares)[::-1]), np.ones(columns)])


WORKLOAD = Workload(
    "SVD", "1,000,000 x 1,000 in chunks of 10,000 rows, 8 GB", make, run, expected, tolerance=1e-6
)

if __name__ == "__main__":
    main(WORKLOAD)
