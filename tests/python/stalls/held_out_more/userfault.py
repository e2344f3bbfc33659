"""A state is restored lazily: its pages come from a server of pages, which waits for its storage."""

import ctypes
import fcntl
import mmap
import os
import struct

from crew import RANK, Hub

SYS_USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER = 323, 0xC018AA3F, 0xC020AA00
SIZE = 1 << 20


def serve_pages(faults):
    storage, _writer = os.pipe()
    os.read(faults, 32)
    os.read(storage, 4096)


def map_lazily():
    state = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    faults = ctypes.CDLL(None, use_errno=True).syscall(SYS_USERFAULTFD, 0)
    if faults < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    fcntl.ioctl(faults, UFFDIO_API, struct.pack("QQQ", 0xAA, 0, 0))
    address = ctypes.addressof(ctypes.c_char.from_buffer(state))
    fcntl.ioctl(faults, UFFDIO_REGISTER, struct.pack("QQQQ", address, SIZE, 1, 0))
    if os.fork() == 0:
        serve_pages(faults)
        os._exit(0)
    os.close(faults)
    return state


def restore_state(state):
    return sum(state[i] for i in range(0, SIZE, 4096))


hub = Hub()
hub.meet()
if RANK == 2:
    restore_state(map_lazily())
hub.meet()
