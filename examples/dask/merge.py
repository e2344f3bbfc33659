"""Merge of two tables on random keys, as in "Getting Started with UCX-Py" (figure 1): nearly all rows
change workers. With cuDF where there is one (`DASK_DATAFRAME__BACKEND=cudf`)."""

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import wait
from workload import Workload, main

#: Rows of a part, and parts of each table.
ROWS, PARTS = 2_500_000, 16


def part(column, number, rows):
    state = np.random.default_rng([3, len(column), number])
    return pd.DataFrame({"key": state.integers(0, rows * PARTS, rows), column: state.integers(0, 1000, rows)})


def make(client, scale):
    rows = int(ROWS * scale)
    made = lambda column: dd.from_map(lambda number: part(column, number, rows), range(PARTS))
    tables = [made("left"), made("right")]
    if dask.config.get("dataframe.backend", "pandas") != "pandas":
        tables = [table.to_backend() for table in tables]
    tables = client.persist(tables)
    wait(tables)
    return tables


def sums(table):
    return [len(table), table["key"].sum(), (table["left"] * table["right"]).sum()]


def run(client, tables):
    left, right = tables
    merged = client.persist(left.merge(right, on="key"))
    wait(merged)
    return client.gather(client.compute([merged.shape[0], *sums(merged)[1:]]))


def expected(scale):
    rows = int(ROWS * scale)
    whole = lambda column: pd.concat([part(column, number, rows) for number in range(PARTS)])
    return sums(whole("left").merge(whole("right"), on="key"))


WORKLOAD = Workload("merge", "two tables of 40,000,000 rows, 1.3 GB", make, run, expected, tolerance=0)

if __name__ == "__main__":
    main(WORKLOAD)
