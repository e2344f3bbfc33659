"""A rank asks a daemon that it has started, which waits 9 s for its next turn."""

import os
import socket
import threading

from team import RANK, Star


def serve(listener):
    link, _ = listener.accept()
    while link.recv(64):
        threading.Event().wait(9)
        link.send(b"done")


def daemon():
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        # The child of nobody.
        os.setsid()
        if os.fork() == 0:
            serve(listener)
        os._exit(0)
    os.wait()
    return socket.create_connection(listener.getsockname())


star = Star()
if RANK == 0:
    link = daemon()
while True:
    if RANK == 0:
        link.send(b"next")
        link.recv(64)
    star.barrier()
