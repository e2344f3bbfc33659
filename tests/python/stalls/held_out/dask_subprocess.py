"""A task runs a converter that reads from a pipe which nobody writes."""

import os
import subprocess
import tempfile

from distributed import Client


def convert(folder):
    path = os.path.join(folder, "in")
    os.mkfifo(path)
    return subprocess.run(["cat", path], capture_output=True, check=True).stdout


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = {w["name"]: address for address, w in workers.items()}
    folder = tempfile.mkdtemp(prefix="held-out-")
    client.submit(convert, folder, workers=[names["gpu2"]]).result()
