"""A rank sends its log through a buffer, which it can have back only when rank 0 has received the log."""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
log = numpy.zeros(1_000_000)


def flush_log():
    MPI.Attach_buffer(bytearray(log.nbytes + MPI.BSEND_OVERHEAD))
    world.Bsend(log, dest=0, tag=5)
    MPI.Detach_buffer()


world.Barrier()
if world.rank == 3:
    flush_log()
world.Barrier()
if world.rank == 0:
    world.Recv(log, source=3, tag=5)
