"""Rank 0 computes for 9 s and sends a datagram to each of the others, which wait for it."""

import socket
import time

from team import HOST, PORT, RANK, SIZE, Star

star = Star()
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind((HOST, PORT + 1 + RANK))
star.barrier()
while True:
    if RANK == 0:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            sum(range(10000))
        for i in range(1, SIZE):
            mine.sendto(b"go on", (HOST, PORT + 1 + i))
    else:
        mine.recv(64)
