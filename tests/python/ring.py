"""A rank that sends so many bytes to the next one over TCP: `ring.py BYTES FOLDER`.

It keeps its connections until the folder has a file named `end`, so that others can look.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path

size, folder = int(sys.argv[1]), Path(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def place(of):
    return folder / f"port-{of}"


with socket.create_server(("127.0.0.1", 0)) as server:
    written = folder / f"new-{rank}"
    written.write_text(str(server.getsockname()[1]))
    written.rename(place(rank))
    following = (rank + 1) % world
    while not place(following).exists():
        time.sleep(0.01)
    there = socket.create_connection(("127.0.0.1", int(place(following).read_text())))
    here, _ = server.accept()
sender = threading.Thread(target=there.sendall, args=(b"x" * size,))
sender.start()
left = size
while left:
    left -= len(here.recv(min(left, 1 << 20)))
sender.join()
(folder / f"done-{rank}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
