"""A task asks for a resource by a name that no worker has been given."""

import os

from distributed import Client


def load_block(i):
    return i


def train_block(block):
    return block * 2


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    blocks = client.map(load_block, range(8))
    client.gather([client.submit(train_block, block, resources={"A100": 1}) for block in blocks])
