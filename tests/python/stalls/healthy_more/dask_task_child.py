"""Tasks run programs that wait for 9 s."""

import os
import subprocess

from distributed import Client


def convert(number):
    return subprocess.run(["sh", "-c", "sleep 9; echo done"], capture_output=True, check=True).stdout


if __name__ == "__main__":
    client = Client(os.environ["DASK_SCHEDULER_ADDRESS"])
    while True:
        client.gather(client.map(convert, range(2), pure=False))
