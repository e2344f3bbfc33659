"""Rank 0 counts itself among those who send results, and waits for one result too many."""

from mpi4py import MPI

world = MPI.COMM_WORLD


def gather_results():
    return [world.recv(source=MPI.ANY_SOURCE, tag=1) for _ in range(world.size)]


def next_round():
    return world.bcast(1 if world.rank == 0 else None, root=0)


world.Barrier()
if world.rank == 0:
    gather_results()
else:
    world.send(world.rank * 10, dest=0, tag=1)
next_round()
