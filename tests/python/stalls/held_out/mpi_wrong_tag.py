"""A rank waits for a message with a tag that no rank sends."""

from mpi4py import MPI

world = MPI.COMM_WORLD


def receive_parameters():
    return world.recv(source=0, tag=7)


if world.rank == 0:
    for i in range(1, world.size):
        world.send({"lr": 0.1}, dest=i, tag=8 if i == 1 else 7)
else:
    receive_parameters()
world.Barrier()
