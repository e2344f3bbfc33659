"""A session with the database, of which there may be one, is opened by a task on one worker and never closed."""

import os

from distributed import Client, Semaphore, get_worker


def open_session():
    session = Semaphore(max_leases=1, name="database")
    session.acquire()
    get_worker().session = session


def read_rows(i):
    with Semaphore(max_leases=1, name="database"):
        return i


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    client.submit(open_session, workers=[names["gpu0"]]).result()
    client.submit(read_rows, 1, workers=[names["gpu3"]]).result()
