"""One rank averages its metrics before its gradients, the others after; each has a communicator of its own."""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
of_gradients, of_metrics = world.Dup(), world.Dup()


def average_gradients():
    of_gradients.Allreduce(MPI.IN_PLACE, numpy.zeros(1000))


def average_metrics():
    of_metrics.Allreduce(MPI.IN_PLACE, numpy.zeros(8))


for step in range(10):
    if world.rank == 3 and step == 5:
        average_metrics()
        average_gradients()
    else:
        average_gradients()
        average_metrics()
