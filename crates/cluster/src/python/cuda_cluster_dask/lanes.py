"""What carries the connections of a worker: UCX's lanes, the ways of direct://, or a socket.

*Invariant:* lanes are read from the connection that carries the data, never from a setting.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import TypedDict

import dask
from distributed import Worker

from cuda_cluster_dask import control, internals
from cuda_cluster_dask.internals import Comm

# `  lane[0]:  2:posix/memory.0 md[1] -> …`; the number after the dot is UCX's own.
LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)(?:\.\d+)?\s")

# `#      resource 3  :  md 2  dev 3  flags -- rc_mlx5/mlx5_0:1`
RESOURCE = re.compile(r"^#.*resource.*\s\S+/(\S+)$", re.MULTILINE)

# A way of direct:// has carried the data if it has carried this share of them; the rest are headers.
SHARE = 0.1


class Peer(TypedDict):
    """What the supervisor is told of a connection."""

    peer: str
    lanes: list[str]


def of(comm: Comm) -> list[str]:
    """What can carry the data of a connection: for direct:// and UCX all that there is."""
    endpoint = internals.ucx_endpoint(comm)
    if endpoint is not None:
        return list(dict.fromkeys(LANE.findall(describe(endpoint))))
    if not is_direct(comm):
        return [comm.peer_address.partition("://")[0]]
    info = comm.extra_info
    there = {"copy": info["copies"][0], "mapped": info["maps"]}
    ways = [way for way in there if there[way]]
    return [*(f"direct/{way}" for way in ways or [info["socket"]]), *(info["devices"] or info["ucx"] or [])]


def is_direct(comm: Comm) -> bool:
    return str(comm.peer_address).startswith("direct://")


def received(comm: Comm) -> dict[str, int] | None:
    """What this process has received by each way of direct://; None for other connections."""
    if not is_direct(comm):
        return None
    from cuda_cluster import comm as direct

    return direct.received()


def carried(comm: Comm, before: dict[str, int] | None, size: int) -> list[str]:
    """What has carried the `size` bytes that came over a connection since `before`."""
    now = received(comm)
    if before is None or now is None:
        return of(comm)
    info = comm.extra_info
    lanes = {
        "copied": ["direct/copy"],
        "mapped": ["direct/mapped"],
        "socket": [f"direct/{info['socket']}"],
        "ucx": info["ucx"] or [],
        "device": info["devices"] or [],
    }
    used = [way for way in now if now[way] - before[way] > SHARE * size]
    return [lane for way in used for lane in lanes[way]]


def cause(comm: Comm, memory: str, by_rdma: bool) -> str | None:
    """Why a connection has no better lanes, as far as this end knows; `by_rdma` if that is planned."""
    if not is_direct(comm):
        return None
    if memory == "device":
        if comm.extra_info["devices"] is not None:
            return None
        return "one of both processes cannot send device memory over UCX; its log says why"
    route = dask.config.get("distributed.comm.direct.route", default="auto")
    if route != "auto":
        return f"distributed.comm.direct.route is {route}"
    if by_rdma:
        from cuda_cluster import _plane

        ends = {"receiver": comm.local_info, "sender": comm.remote_info}
        without = [end for end, info in ends.items() if not info.get(_plane.HOST)]
        no_port = "no RDMA port that is active, or a UCX that does not open it: its log says so"
        return f"the {without[0]} takes nothing over UCX ({no_port})" if without else None
    if getattr(comm._connection, "refused", False):
        return (
            "processes may not read each other's memory here (kernel.yama.ptrace_scope, or a "
            "container's seccomp profile)"
        )
    return None


def ports_not_opened(protocol: str) -> list[str]:
    """NIC ports that the plan names and UCX has not opened; UCX says so in the log only."""
    named = os.environ.get("UCX_NET_DEVICES", "").split(",")
    planned = [name for name in named if ":" in name]
    if not planned or not protocol.startswith("ucx"):
        return []
    from ucxx import core

    opened = RESOURCE.findall(core.get_ucp_context_info())
    return [port for port in planned if port not in opened]


class Peers:
    """The lanes of the connections that a worker has opened to the other workers of its cluster.

    *Invariant:* while no connection is opened to another peer, nothing is read and nobody is asked.
    """

    def __init__(self, worker: Worker, names: Mapping[str, str]) -> None:
        """`names` are those of processes whose addresses are known, by address."""
        self._worker = worker
        self._names = dict(names)
        self._lanes: dict[str, list[str]] = {}
        self._look()
        self._told = self._listed()

    def told(self) -> list[Peer]:
        """What the supervisor has been told."""
        return self._told

    def have_changed(self) -> bool:
        """Whether there is a connection to a process that is not known."""
        return not self._connections().keys() <= self._lanes.keys()

    async def changes(self) -> list[Peer] | None:
        """All lanes, if they are not those that were told last, else None."""
        state = await control.state()
        if state is None:
            return None
        places = {one["name"]: one["address"] for one in state["workers"]}
        self._names |= {address: name for name, address in places.items() if address}
        # A worker that was started again has another address.
        gone = [at for at, name in self._names.items() if places.get(name) not in (at, None)]
        for address in gone:
            self._names.pop(address)
            self._lanes.pop(address, None)
        self._look()
        listed = self._listed()
        if listed == self._told:
            return None
        self._told = listed
        return listed

    def _look(self) -> None:
        for address, comm in self._connections().items():
            if address in self._names and address not in self._lanes:
                self._lanes[address] = of(comm)

    def _connections(self) -> dict[str, Comm]:
        """One open connection to each process but the scheduler and itself."""
        found = internals.connections(self._worker)
        for other in (self._worker.scheduler.address, self._worker.address):
            found.pop(other, None)
        return found

    def _listed(self) -> list[Peer]:
        listed = [(self._names[address], used) for address, used in self._lanes.items()]
        return [{"peer": peer, "lanes": used} for peer, used in sorted(listed)]


def describe(endpoint: int) -> str:
    """What UCX prints of an endpoint, by its handle; the lanes of all versions stand in it."""
    libc, libucp = ctypes.CDLL(None), ctypes.CDLL("libucp.so.0")
    libc.open_memstream.restype = ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    libc.free.argtypes = [ctypes.c_void_p]
    libucp.ucp_ep_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    text, length = ctypes.c_void_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(length))
    libucp.ucp_ep_print_info(endpoint, stream)
    libc.fclose(stream)
    try:
        return ctypes.string_at(text, length.value).decode()
    finally:
        libc.free(text)
