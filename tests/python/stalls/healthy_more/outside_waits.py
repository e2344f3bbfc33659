"""A rank asks a server outside of the job, which itself waits for 9 s (a queue of requests, say)."""

import os
import urllib.request

from team import RANK, Star

star = Star()
while True:
    if RANK == 1:
        urllib.request.urlopen(os.environ["OUTSIDE"] + "/wait").read()
    star.barrier()
