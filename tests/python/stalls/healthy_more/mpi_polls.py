"""Ranks look for messages every 0.2 s; rank 0 sends one after each computation of 8 s."""

import time

from mpi4py import MPI

world = MPI.COMM_WORLD
while True:
    if world.rank == 0:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            sum(range(10000))
        for i in range(1, world.size):
            world.send(i, dest=i)
    else:
        while not world.iprobe(source=0):
            time.sleep(0.2)
        world.recv(source=0)
