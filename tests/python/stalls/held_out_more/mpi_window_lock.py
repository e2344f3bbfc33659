"""A rank goes on without giving back the lock of a window; another rank waits for that lock."""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
window = MPI.Win.Allocate(8, 8, comm=world)
one = numpy.ones(1)


def reserve_range():
    window.Lock(0, MPI.LOCK_EXCLUSIVE)
    window.Put(one, 0)
    window.Flush(0)


def update_counter():
    window.Lock(0, MPI.LOCK_EXCLUSIVE)
    window.Put(one, 0)
    window.Unlock(0)


if world.rank == 2:
    reserve_range()
world.Barrier()
if world.rank == 1:
    update_counter()
world.Barrier()
