"""Ranks send large messages to rank 0, which computes for 9 s before it receives each of them."""

import time

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
field = numpy.zeros(1 << 20)
while True:
    if world.rank == 0:
        for i in range(1, world.size):
            end = time.monotonic() + 3
            while time.monotonic() < end:
                sum(range(10000))
            world.Recv(field, source=i)
    else:
        world.Send(field, dest=0)
