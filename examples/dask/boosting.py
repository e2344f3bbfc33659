"""XGBoost over all workers by its interface for Dask, which finds them by their addresses. On GPUs it is
`{"device": "cuda"}`."""

import dask.array as da
import numpy as np
import xgboost
from distributed import wait
from workload import Workload, main
from xgboost import dask as over_dask

ROWS, COLUMNS, PARTS, ROUNDS = 10_000_000, 20, 16, 20
SETTINGS = {"objective": "reg:squarederror", "tree_method": "hist", "max_depth": 6, "seed": 1, "nthread": 1}


def part(number, rows):
    """Inputs, and in the last column what is to be learned."""
    state = np.random.default_rng([6, number])
    x = state.random((rows, COLUMNS))
    y = x[:, 0] * 3 + np.sin(6 * x[:, 1]) + x[:, 2] * x[:, 3] + state.normal(0, 0.1, rows)
    return np.column_stack([x, y])


def make(client, scale):
    rows = max(100, int(ROWS * scale) // PARTS)
    data = da.map_blocks(
        lambda block_info=None: part(block_info[None]["chunk-location"][0], rows),
        chunks=((rows,) * PARTS, (COLUMNS + 1,)),
        dtype=float,
        meta=np.empty((0, 0)),
    ).persist()
    wait(data)
    return data


def error(model):
    """Root of the mean square on rows that nobody has learned from."""
    test = part(PARTS, 20_000)
    return float(np.sqrt(np.mean((model.predict(xgboost.DMatrix(test[:, :-1])) - test[:, -1]) ** 2)))


def run(client, data):
    matrix = over_dask.DaskDMatrix(client, data[:, :-1], data[:, -1])
    return error(over_dask.train(client, SETTINGS, matrix, num_boost_round=ROUNDS)["booster"])


def expected(scale):
    data = np.concatenate([part(number, max(100, int(ROWS * scale) // PARTS)) for number in range(PARTS)])
    matrix = xgboost.DMatrix(data[:, :-1], data[:, -1])
    return error(xgboost.train(SETTINGS, matrix, num_boost_round=ROUNDS))


# Each worker cuts its own rows into bins, so the trees are others, but as good.
WORKLOAD = Workload("XGBoost", "10,000,000 rows of 20 columns, 1.7 GB", make, run, expected, tolerance=0.05)

if __name__ == "__main__":
    main(WORKLOAD)
