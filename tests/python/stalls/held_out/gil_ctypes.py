"""A library that is called with the interpreter's lock reads from a device that sends nothing."""

import ctypes
import os
import threading

from team import RANK, Ring


def poll_device(end):
    ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(8), 8)


ring = Ring()
ring.barrier()
if RANK == 1:
    ends = os.pipe()
    threading.Thread(target=poll_device, args=(ends[0],), name="device").start()
while True:
    ring.barrier()
