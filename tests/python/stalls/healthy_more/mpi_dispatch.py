"""Rank 0 hands out tasks one by one, and the workers compute for different times."""

import time

from mpi4py import MPI

world = MPI.COMM_WORLD
if world.rank == 0:
    while True:
        status = MPI.Status()
        world.recv(source=MPI.ANY_SOURCE, status=status)
        world.send(4 * status.source, dest=status.source)
else:
    while True:
        world.send("idle", dest=0)
        end = time.monotonic() + world.recv(source=0)
        while time.monotonic() < end:
            sum(range(10000))
