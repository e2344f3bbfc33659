"""A file system in a program of its own (an object store) answers each request after 8 s."""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time

from team import RANK, Star

SERVER = """
import os, struct, sys, time
end = int(sys.argv[1])
unique = struct.unpack_from("<IIQ", os.read(end, 1 << 17))[2]
answer = struct.pack("<IIIIHHI", 7, 26, 1 << 16, 0, 12, 9, 1 << 16) + bytes(40)
os.write(end, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
while True:
    unique = struct.unpack_from("<IIQ", os.read(end, 1 << 17))[2]
    time.sleep(8)
    os.write(end, struct.pack("<IiQ", 16, -2, unique))
"""


def mount():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000):
        raise OSError(ctypes.get_errno(), "unshare")
    libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None)
    end = os.open("/dev/fuse", os.O_RDWR)
    folder = tempfile.mkdtemp(prefix="healthy-fuse-")
    options = f"fd={end},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"objects", folder.encode(), b"fuse.objects", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    subprocess.Popen([sys.executable, "-c", SERVER, str(end)], pass_fds=[end])
    os.close(end)
    time.sleep(0.5)
    return folder


star = Star()
if RANK == 0:
    folder = mount()
step = 0
while True:
    step += 1
    if RANK == 0:
        # It is not there yet; the server says so, late.
        with contextlib.suppress(FileNotFoundError):
            os.stat(os.path.join(folder, f"step-{step}"))
    star.barrier()
