"""A rank waits for a datagram with a limit of 3 s, and tries four times before it goes on without."""

import socket

from team import RANK, Ring

ring = Ring()
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("127.0.0.1", 0))
end.settimeout(3)
while True:
    if RANK == 0:
        for _ in range(4):
            try:
                end.recv(100)
            except TimeoutError:
                pass
    ring.barrier()
