"""A rank runs a script that waits 11 s for a service to come up."""

import subprocess

from team import RANK, Star

star = Star()
while True:
    if RANK == 1:
        subprocess.run(["sh", "-c", "sleep 11; true"], check=True)
    star.barrier()
