"""Opens UCX, and closes the sockets by which it is woken to empty datagrams.

Each of UCX's transports over shared memory has such a socket. Its name is in the abstract namespace,
so every user of the machine can send to it, and UCX ends the process when an empty datagram comes
while nobody uses the transport. Peers send one byte. What is left to a stranger is to wake the process.
(`ucx/wakeup.rs` does the same for native workers and direct://.)
"""

import ctypes
import os
import socket

from cuda_cluster_dask import internals

SO_ATTACH_FILTER = 26  # asm-generic/socket.h
AT_ONCE = 4096  # More than a queue has (net.unix.max_dgram_qlen).


class Step(ctypes.Structure):
    """`struct sock_filter`: one instruction of the kernel's packet filter."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Step))]


# A filter returns how many bytes to keep, and 0 drops the datagram: BPF_LD | BPF_W | BPF_LEN and
# BPF_RET | BPF_A return its length.
LENGTH = (Step * 2)(Step(0x80, 0, 0, 0), Step(0x16, 0, 0, 0))


def open_ucx(protocol: str) -> str | None:
    """Opens UCX before Dask does, if that is the protocol. Returns None, or why other users of this
    machine can end this process."""
    if not protocol.startswith("ucx"):
        return None
    before = {inode for _, inode in sockets()}
    internals.open_ucx(protocol)
    try:
        for number, inode in sockets():
            if inode not in before:
                with socket.socket(fileno=os.dup(number)) as one:
                    if is_wakeup(one):
                        discard_empty(one)
    except OSError as error:
        return f"other users of this machine can end this process by an empty datagram to UCX: {error}"
    return None


def sockets() -> list[tuple[int, str]]:
    """Descriptor and inode of each socket of this process."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # Another thread has closed it, or it was that of the list.
        if target.startswith("socket:"):
            found.append((int(entry), target))
    return found


def is_wakeup(one: socket.socket) -> bool:
    """Whether a socket is like UCX's: for datagrams, with an abstract name."""
    if one.family != socket.AF_UNIX or one.type != socket.SOCK_DGRAM:
        return False
    name = one.getsockname()
    return isinstance(name, bytes) and name.startswith(b"\0")


def discard_empty(one: socket.socket) -> None:
    """Has the kernel drop empty datagrams before they are queued."""
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(Program(len(LENGTH), LENGTH)))
    for _ in range(AT_ONCE):
        try:
            one.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # What came before.
