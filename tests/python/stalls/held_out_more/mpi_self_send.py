"""The neighbour of the first rank is computed to be itself, and what it sends to itself it never receives."""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD


def push_boundary(edge):
    neighbour = max(world.rank - 1, 0)
    world.Ssend(edge, dest=neighbour)


def pull_boundary(edge):
    if world.rank < world.size - 1:
        world.Recv(edge, source=world.rank + 1)


edge = numpy.zeros(1000)
world.Barrier()
if world.rank % 2:
    push_boundary(edge)
    pull_boundary(edge)
else:
    pull_boundary(edge)
    push_boundary(edge)
world.Barrier()
