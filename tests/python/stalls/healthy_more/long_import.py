"""A rank imports a large package only when it needs it."""

import time

from team import RANK, Star

star = Star()
star.barrier()
if RANK == 1:
    import torch  # noqa: F401
star.barrier()
while True:
    time.sleep(1)
    star.barrier()
