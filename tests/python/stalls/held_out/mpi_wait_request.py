"""Rank 0 waits for a result that rank 2 had no reason to send."""

from mpi4py import MPI

world = MPI.COMM_WORLD


def collect_results():
    pending = [world.irecv(source=i) for i in range(1, world.size)]
    return [one.wait() for one in pending]


def main():
    if world.rank == 0:
        collect_results()
    elif world.rank != 2:
        world.send(world.rank, dest=0)
    world.Barrier()


main()
