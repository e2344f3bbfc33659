"""A rank opens its halo for two neighbours and waits until both have put theirs; one of them has nothing to put."""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
window = MPI.Win.Allocate(800, 8, comm=world)
edge = numpy.ones(10)


def expose_halo():
    window.Post(world.group.Incl([0, 2]))
    window.Wait()


def put_halo(edge):
    if not len(edge):
        return
    window.Start(world.group.Incl([1]))
    window.Put(edge, 1)
    window.Complete()


world.Barrier()
if world.rank == 1:
    expose_halo()
elif world.rank == 0:
    put_halo(edge)
elif world.rank == 2:
    put_halo(edge[:0])
world.Barrier()
