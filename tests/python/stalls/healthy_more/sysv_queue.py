"""A rank waits in a queue of messages of System V for its child, which computes for 9 s for each."""

import ctypes
import os
import time

from team import RANK, Star

NEW_IPC = 0x08000000
libc = ctypes.CDLL(None, use_errno=True)
star = Star()
if RANK == 2:
    # A namespace of its own: what is left in it goes with it.
    libc.unshare(NEW_IPC)
    queue = libc.msgget(0, 0o600)
    message = ctypes.create_string_buffer(16)
    message[0:8] = (1).to_bytes(8, "little")
    if os.fork() == 0:
        while True:
            end = time.monotonic() + 9
            while time.monotonic() < end:
                sum(range(10000))
            libc.msgsnd(queue, message, 8, 0)
while True:
    if RANK == 2:
        libc.msgrcv(queue, message, 8, 0, 0)
    star.barrier()
