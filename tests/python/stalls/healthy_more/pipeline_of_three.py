"""A rank reads what a pipeline of the shell writes, whose first program waits for 9 s."""

import subprocess

from team import RANK, Ring

ring = Ring()
while True:
    if RANK == 2:
        subprocess.check_output("(sleep 9; seq 100000) | sort -r | md5sum", shell=True)
    ring.barrier()
