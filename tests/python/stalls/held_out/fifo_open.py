"""A rank opens a pipe with a name for which no writer comes."""

import os
import tempfile

from team import PORT, RANK, Star

PATH = os.path.join(tempfile.gettempdir(), f"held-out-{PORT}.fifo")


def open_feed():
    os.mkfifo(PATH)
    return open(PATH, "rb")


star = Star()
star.barrier()
if RANK == 2:
    open_feed()
star.barrier()
