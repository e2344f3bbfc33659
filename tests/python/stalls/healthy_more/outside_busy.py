"""A rank asks a server outside of the job, which computes for 9 s for an answer."""

import os
import urllib.request

from team import RANK, Star

star = Star()
while True:
    if RANK == 1:
        urllib.request.urlopen(os.environ["OUTSIDE"] + "/busy").read()
    star.barrier()
