"""Ranks begin a barrier and ask every 0.1 s whether it is over; rank 3 computes for 11 s before it comes."""

import time

from mpi4py import MPI

world = MPI.COMM_WORLD
while True:
    if world.rank == 3:
        end = time.monotonic() + 11
        while time.monotonic() < end:
            sum(range(10000))
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.1)
