"""A rank waits for news with a limit of 12 s, and goes on without."""

import select
import socket

from team import RANK, Star

star = Star()
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("127.0.0.1", 0))
while True:
    if RANK == 2:
        select.select([end], [], [], 12)
    star.barrier()
