"""Means and spreads of groups, of which there are so many that the result is shuffled, too."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask import delayed
from distributed import wait
from workload import Workload, main

ROWS, PARTS = 5_000_000, 16


def part(number, rows):
    state = np.random.default_rng([4, number])
    return pd.DataFrame({"group": state.integers(0, rows, rows), "value": state.integers(0, 1000, rows)})


def make(client, scale):
    table = dd.from_map(lambda number: part(number, int(ROWS * scale)), range(PARTS)).persist()
    wait(table)
    return table


def figures(groups):
    """Of a table of count, sum and maximum by group."""
    weights = groups.index.to_numpy() % 97
    return np.array(
        [len(groups), *((groups[name].to_numpy() * weights).sum() for name in ("count", "sum", "max"))]
    )


def run(client, table):
    groups = table.groupby("group")["value"].agg(["count", "sum", "max"], split_out=PARTS).persist()
    wait(groups)
    return sum(client.gather(client.compute([delayed(figures)(part) for part in groups.to_delayed()])))


def expected(scale):
    whole = pd.concat([part(number, int(ROWS * scale)) for number in range(PARTS)])
    return figures(whole.groupby("group")["value"].agg(["count", "sum", "max"]))


WORKLOAD = Workload(
    "groupby", "80,000,000 rows in 5,000,000 groups, 1.3 GB", make, run, expected, tolerance=0
)

if __name__ == "__main__":
    main(WORKLOAD)
