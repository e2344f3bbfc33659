"""A rank waits in a message queue of POSIX for its child, which waits 9 s before each message."""

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
    queue = libc.mq_open(b"/news", os.O_RDWR | os.O_CREAT, 0o600, None)
    if os.fork() == 0:
        while True:
            time.sleep(9)
            libc.mq_send(queue, b"news", 4, 0)
    message = ctypes.create_string_buffer(8192)
while True:
    if RANK == 2:
        libc.mq_receive(queue, message, 8192, None)
    star.barrier()
