"""Rides of taxis from CSV to Parquet to means by hour: the data are made, in the columns of New York's."""

import pathlib
import shutil
import tempfile

import dask.dataframe as dd
import numpy as np
import pandas as pd
from workload import Workload, main

ROWS, FILES = 1_000_000, 12
FIGURES = ["minutes", "share", "fare_amount"]


def rides(month, rows):
    state = np.random.default_rng([8, month])
    begin = pd.Timestamp(2019, month + 1, 1) + pd.to_timedelta(state.integers(0, 28 * 86400, rows), unit="s")
    return pd.DataFrame({
        "tpep_pickup_datetime": begin,
        "tpep_dropoff_datetime": begin + pd.to_timedelta(state.integers(60, 3600, rows), unit="s"),
        "passenger_count": state.integers(0, 7, rows),
        "fare_amount": state.integers(250, 10_000, rows) / 100,
        "tip_amount": state.integers(0, 2_000, rows) / 100,
    })  # fmt: skip


def write(folder, month, rows):
    rides(month, rows).to_csv(pathlib.Path(folder, f"{month:02}.csv"), index=False)


def make(client, scale):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="taxi-"))
    client.gather(client.map(lambda month: write(folder, month, int(ROWS * scale)), range(FILES)))
    return folder


def by_hour(table):
    table = table[(table["passenger_count"] > 0) & (table["fare_amount"] > 5)]
    hour = table["tpep_pickup_datetime"].dt.hour
    minutes = (table["tpep_dropoff_datetime"] - table["tpep_pickup_datetime"]).dt.total_seconds() / 60
    table = table.assign(hour=hour, minutes=minutes, share=table["tip_amount"] / table["fare_amount"])
    # Dask's optimiser may give them in another order.
    return table.groupby("hour")[FIGURES].mean()[FIGURES]


def run(client, folder):
    try:
        dates = ["tpep_pickup_datetime", "tpep_dropoff_datetime"]
        dd.read_csv(folder / "*.csv", parse_dates=dates).to_parquet(folder / "parquet")
        return by_hour(dd.read_parquet(folder / "parquet")).compute().sort_index().to_numpy()
    finally:
        shutil.rmtree(folder)


def expected(scale):
    months = [rides(month, int(ROWS * scale)) for month in range(FILES)]
    return by_hour(pd.concat(months)).sort_index().to_numpy()


WORKLOAD = Workload("taxi", "12 files of 1,000,000 rides, 0.7 GB of CSV", make, run, expected)

if __name__ == "__main__":
    main(WORKLOAD)
