"""A rank has fewer files than the others: it comes to the end of the program while they still sum their losses."""

from mpi4py import MPI

world = MPI.COMM_WORLD


def average_loss(loss):
    return world.allreduce(loss) / world.size


def main():
    files = 5 if world.rank == 2 else 8
    for _i in range(files):
        average_loss(0.5)


main()
