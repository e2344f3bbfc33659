"""Each rank has a thread that listens for messages until it is told to stop; one rank does not tell its own."""

import threading

from mpi4py import MPI

world = MPI.COMM_WORLD
messages = world.Dup()


def listen():
    while messages.recv(source=MPI.ANY_SOURCE) != "stop":
        pass


def stop_listener(thread, failed):
    if not failed:
        messages.send("stop", dest=world.rank)
    thread.join()


thread = threading.Thread(target=listen, name="listener")
thread.start()
world.Barrier()
stop_listener(thread, failed=world.rank == 2)
world.Barrier()
