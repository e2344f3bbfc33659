"""Rank 0 gathers and writes to the disk for some seconds; the others are in the next gather."""

import os
import tempfile

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
part = numpy.random.bytes(4 << 20)
path = os.path.join(tempfile.gettempdir(), f"healthy-mpi-{os.getpid()}")
while True:
    parts = world.gather(part, root=0)
    if world.rank == 0:
        with open(path, "wb") as file:
            for _ in range(6):
                for one in parts:
                    file.seek(0)
                    file.write(one)
                    file.flush()
                    os.fsync(file.fileno())
