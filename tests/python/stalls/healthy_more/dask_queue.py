"""A task waits at a queue of the cluster, into which the client puts something every 10 s."""

import os
import time

from distributed import Client, Queue


def take():
    return Queue("orders").get()


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    orders = Queue("orders")
    while True:
        task = client.submit(take, pure=False)
        time.sleep(10)
        orders.put("order")
        task.result()
