"""Proof that every pair of workers moves data over the transport that it should use.

Each worker, once registered, asks every other for bytes and looks at what they came over: the
connection's scheme, and for UCX the lanes of its endpoint, from UCX's own description of it.

*Invariant:* a worker that says READY has received every peer's bytes, whole and unchanged.
"""

import asyncio
import ctypes
import os
import re

from distributed.core import send_recv
from distributed.protocol import to_serialize

from cuda_cluster_dask import control
from cuda_cluster_dask.failure import StartFailure

OPERATION = "cuda_cluster_bytes"
SIZE = 4 << 20  # Bytes: beyond every eager protocol, so that the bulk lanes carry them.
LOOK_AGAIN = 0.02
PEERS_STORY = 5.0  # Seconds in which a peer that failed has everything torn down.

# `  lane[0]:  2:posix/memory.0 md[1] -> …`; the number after the dot is UCX's own.
LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)(?:\.\d+)?\s")


# `#      resource 3  :  md 2  dev 3  flags -- rc_mlx5/mlx5_0:1`
RESOURCE = re.compile(r"^#.*resource.*\s\S+/(\S+)$", re.MULTILINE)


def ports_not_opened(protocol):
    """NIC ports that the plan names and UCX has not opened; UCX says so in the log only."""
    named = os.environ.get("UCX_NET_DEVICES", "").split(",")
    planned = [name for name in named if ":" in name]
    if not planned or not protocol.startswith("ucx"):
        return []
    from ucxx import core

    opened = RESOURCE.findall(core.get_ucp_context_info())
    return [port for port in planned if port not in opened]


def answer(worker):
    """Has a worker that is not started yet answer those that will ask for bytes."""
    worker.handlers[OPERATION] = lambda name: {"data": to_serialize(pattern(name))}


def pattern(name):
    """Bytes that only the asker `name` is sent."""
    seed = str(name).encode() + b"\0"
    return (seed * (SIZE // len(seed) + 1))[:SIZE]


async def peers(worker, wanted, status):
    """Proves the ways to all wanted peers; returns the lanes of each, for the status pipe."""
    found = await _registered(worker, wanted["peers"], status)
    lanes = []
    for peer, address in found.items():
        status.step(f"verifying the way to {peer}")
        used = await _fetch(worker, peer, address)
        for group in wanted["transports"]:
            if not any(lane.partition("/")[0] in group for lane in used):
                names = ", ".join(used) or "no lane"
                raise StartFailure(
                    f"data from {peer} comes over {names}; expected was one of {', '.join(group)}"
                )
        lanes.append({"peer": str(peer), "lanes": used})
    return lanes


async def _registered(worker, wanted, status):
    """Addresses of the peers: of all when the cluster starts, of those that are there later."""
    status.step("waiting for all workers to be known to the scheduler")
    while True:
        known = (await worker.scheduler.identity(n_workers=-1))["workers"]
        found = {one["name"]: address for address, one in known.items() if one["name"] in wanted}
        missing = set(wanted) - set(found)
        if not missing or not await control.is_starting():
            found.pop(worker.name, None)
            return found
        status.step("waiting for the scheduler to know " + ", ".join(sorted(map(str, missing))))
        await asyncio.sleep(LOOK_AGAIN)


async def _fetch(worker, peer, address):
    try:
        comm = await worker.rpc.connect(address)
        try:
            reply = await send_recv(comm, op=OPERATION, name=worker.name)
            if bytes(reply["data"]) != pattern(worker.name):
                raise StartFailure(f"data from {peer} arrives changed")
            return _lanes(comm)
        finally:
            worker.rpc.reuse(address, comm)
    except (OSError, TypeError) as error:
        # A peer that found its own way wrong has ended with the better story: it is heard first.
        await asyncio.sleep(PEERS_STORY)
        raise StartFailure(f"no data from {peer}: {error}") from error


def _lanes(comm):
    """What carries a connection: UCX's lanes, what native:// says, else the connection's scheme."""
    endpoint = getattr(comm, "_ep_handle", None)
    if endpoint is None:
        scheme = comm.peer_address.partition("://")[0]
        if scheme != "native":
            return [scheme]
        info = comm.extra_info
        ways = {"copy": info["copies"][0], "mapped": info["maps"]}
        ways = [way for way, there in ways.items() if there]
        return [f"native/{way}" for way in ways or [info["socket"]]]
    return list(dict.fromkeys(LANE.findall(describe(endpoint))))


def describe(endpoint):
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
