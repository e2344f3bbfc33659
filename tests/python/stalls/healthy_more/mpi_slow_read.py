"""A rank sleeps for 9 s between two reads of a slow instrument; the others are in Barrier."""

import time

from mpi4py import MPI

world = MPI.COMM_WORLD
while True:
    if world.rank == 1:
        time.sleep(9)
    world.Barrier()
