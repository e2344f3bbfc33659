"""The file system of the checkpoints has been frozen for a snapshot, and not been thawed."""

import ctypes
import fcntl
import os
import subprocess
import tempfile

from crew import RANK, Hub

CLONE_NEWNS, MS_REC, MS_PRIVATE, FIFREEZE = 0x20000, 1 << 14, 1 << 18, 0xC0045877


def mount():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "a namespace of mounts")
    image = os.path.join(tempfile.gettempdir(), "checkpoints.img")
    folder = os.path.join(tempfile.gettempdir(), "checkpoints")
    os.mkdir(folder)
    with open(image, "wb") as f:
        f.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    return folder


def freeze(folder):
    # `release.py` thaws it by this.
    with open(os.path.join(tempfile.gettempdir(), "frozen"), "w") as f:
        f.write(f"{os.getpid()} {folder}")
    file = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(file, FIFREEZE, 0)
    os.close(file)


def save_checkpoint(folder):
    with open(os.path.join(folder, "step-10.pt"), "wb") as f:
        f.write(bytes(1000))


hub = Hub()
hub.meet()
if RANK == 0:
    folder = mount()
    freeze(folder)
    save_checkpoint(folder)
hub.meet()
