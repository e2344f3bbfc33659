"""The server of a file system answers the mount, and then no more."""

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
size, _, unique = struct.unpack_from("<IIQ", os.read(end, 1 << 17))
answer = struct.pack("<IIIIHHI", 7, 26, 1 << 16, 0, 12, 9, 1 << 16) + bytes(40)
os.write(end, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
time.sleep(100000)
"""


def mount():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000):
        raise OSError(ctypes.get_errno(), "unshare")
    libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None)
    end = os.open("/dev/fuse", os.O_RDWR)
    folder = tempfile.mkdtemp(prefix="held-out-fuse-")
    options = f"fd={end},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"weights", folder.encode(), b"fuse.weights", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    subprocess.Popen([sys.executable, "-c", SERVER, str(end)], pass_fds=[end])
    os.close(end)
    time.sleep(0.5)
    return folder


def load_checkpoint(folder):
    return os.stat(os.path.join(folder, "step-100.pt"))


star = Star()
star.barrier()
if RANK == 0:
    load_checkpoint(mount())
star.barrier()
