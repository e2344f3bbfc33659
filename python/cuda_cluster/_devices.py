"""Device memory between Dask's processes, for ``native://``.

A process that has a CUDA context, RMM, and a UCX that knows CUDA says so when it connects. Between two
such processes, frames in device memory stay there: the sender offers them, and the receiver fetches
them over UCX (``cuda_ipc``, ``rc``), all at once, into memory of RMM's. To all other peers, device
memory goes through host memory, as Dask's own serializers copy it: a scheduler or a client needs no
GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import dask
import msgpack

logger = logging.getLogger("cuda_cluster.comm")

#: What each end of a connection tells the other: where device memory is asked for, or None.
KEY = "native-devices"

#: How messages between two processes with GPUs are serialized.
SERIALIZERS = ("cuda", "dask", "pickle", "error")

#: The libucp to use instead of the one that the loader finds.
LIBRARY = "CUDA_CLUSTER_UCX"


class _Devices:
    """How this process moves device memory."""

    def __init__(self, native: Any):
        self.usable = True
        self._native = native
        self.address, self.described = native.open_devices(_library())
        self._allocate = _allocator()

    def give_up(self, why: object) -> None:
        """From now on device memory goes through host memory."""
        if self.usable:
            logger.warning("native:// moves device memory through host memory from now on: %s", why)
        self.usable = False

    def offer(self, connection: Any, events: Any, frames: list[Any]) -> tuple[list[Any], Any]:
        """The frames as they go over the connection, a description of the others as the last of
        them; and what offers those, if there are any."""
        own = {at: frame for at, frame in enumerate(frames) if is_device(frame)}
        if not own:
            return [*frames, b""], None
        places = [place(frame) for frame in own.values()]
        transfer = self._native.offer_devices(connection, events, places, list(own.values()))
        description = (transfer.id, list(own), [length for _, length, _ in places])
        others = [b"" if at in own else frame for at, frame in enumerate(frames)]
        return [*others, msgpack.packb(description)], transfer

    def fetch(self, connection: Any, events: Any, peer: bytes, frames: list[Any]) -> Any:
        """Takes the description from a message, and puts memory for what it describes into it; what
        fills that from the peer, if there is anything to fill."""
        description = frames.pop()
        if not len(description):
            return None
        number, at, lengths = msgpack.unpackb(description)
        own = [self._allocate(length) for length in lengths]
        for index, frame in zip(at, own, strict=True):
            frames[index] = frame
        places = [place(frame) for frame in own]
        return self._native.fetch_devices(connection, events, peer, number, places, own)

    def lanes(self, peer: bytes) -> list[str]:
        """UCX's lanes to a peer that something was fetched from."""
        lanes: list[str] = self._native.device_lanes(peer)
        return lanes


_process: int | None = None
_devices: _Devices | None = None


def of_this_process(native: Any) -> _Devices | None:
    """How this process moves device memory; None if it has none, or cannot move it."""
    global _process, _devices
    if _process == os.getpid():
        return _devices
    if not _wanted() or not native.has_context():
        # A context may still be made: the next connection asks again.
        return None
    _process, _devices = os.getpid(), None
    try:
        _devices = _Devices(native)
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("native:// moves device memory through host memory: %s", error)
    else:
        logger.info("native:// moves device memory over %s", _devices.described)
    return _devices


def is_device(frame: Any) -> bool:
    return hasattr(frame, "__cuda_array_interface__")


def place(frame: Any) -> tuple[int, int, int | None]:
    """Address, length in bytes, and stream of device memory."""
    interface = frame.__cuda_array_interface__
    shape, strides, item = interface["shape"], interface.get("strides"), int(interface["typestr"][2:])
    length = functools.reduce(int.__mul__, shape, item)
    if strides is not None and length and strides != _contiguous(shape, item):
        raise ValueError("a frame in device memory is not contiguous")
    return interface["data"][0] or 0, length, interface.get("stream")


def _contiguous(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = [item]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return tuple(strides[: len(shape)])


def _wanted() -> bool:
    return bool(dask.config.get("distributed.comm.native.devices", default=True))


def _library() -> str | None:
    named = os.environ.get(LIBRARY)
    if named is None:
        try:
            import libucx
        except ImportError:
            pass
        else:
            # That of the package, as ucxx takes it: the loader has it under its name from now on.
            libucx.load_library()
    return named


def _allocator() -> Callable[[int], Any]:
    import rmm

    return lambda length: rmm.DeviceBuffer(size=length)
