"""The thread with which rank 1 serves parameters has died of a bad request; the connection is still open."""

import socket
import struct
import threading

from crew import HOST, PORT, RANK, Tree, connect, receive

parameters = {step: step * 0.5 for step in range(5)}


def serve_parameters(link):
    while True:
        (step,) = struct.unpack("q", receive(link, 8))
        link.sendall(struct.pack("d", parameters[step]))


def pull_parameters(link, step):
    link.sendall(struct.pack("q", step))
    return struct.unpack("d", receive(link, 8))


link = None
if RANK == 1:
    with socket.create_server((HOST, PORT + 10)) as listener:
        link, _ = listener.accept()
    threading.Thread(target=serve_parameters, args=(link,), name="parameters", daemon=True).start()
elif RANK == 3:
    link = connect(PORT + 10)
tree = Tree()
for step in range(10):
    if RANK == 3:
        pull_parameters(link, step)
    tree.meet()
