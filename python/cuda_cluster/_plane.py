"""Memory between Dask's processes over UCX, for ``direct://``.

*Device memory*: a process that has a CUDA context and RMM says so when it connects. Between two such
processes, frames in device memory stay there. UCX is opened for the first of them, because that and RMM
take longer to load than the rest of a worker. To all other peers, device memory goes through host memory,
as Dask's own serializers copy it: a scheduler or a client needs no GPU.

*Host memory* between machines: a process with an active RDMA port opens UCX when it connects to another
machine, and says so. Between two such processes, large frames go over UCX.

The sender offers frames, and the receiver fetches them (``cuda_ipc``, ``rc``), all at once, into memory of
RMM's or of the pool.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from cuda_cluster._settings import setting

logger = logging.getLogger("cuda_cluster.comm")

#: What each end of a connection tells the other: whether it takes frames in device memory, and large
#: ones of host memory, over UCX.
DEVICES, HOST = "direct-devices", "direct-host-by-ucx"

#: The key of the process at an end of a connection, with which others seal UCX's addresses for it. Only
#: who has been let in is told, so UCX gets no address from anybody else.
KEY = "direct-ucx-key"

#: How messages between two processes with GPUs are serialized.
SERIALIZERS = ("cuda", "dask", "pickle", "error")

#: From this size on, in bytes, frames of host memory go over UCX.
LARGE = 64 << 10

#: Names the libucp to open, for the launcher's own processes and for these.
LIBRARY = "CUDA_CLUSTER_UCX"

#: After so many transfers that failed, and none that arrived, UCX is not used any more.
FAILURES = 3

#: What a wrong description may raise.
WRONG = (
    ArithmeticError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    msgpack.UnpackException,
)

PORTS = Path("/sys/class/infiniband")

#: UCX's transports over RDMA: `rc_verbs`, `dc_mlx5`, `ud_verbs`, `srd`.
RDMA = ("rc_", "dc_", "ud_", "srd")


class _Plane:
    """What this process moves over UCX.

    *Invariant:* once it has given up, it offers nothing and says so to whoever connects; what others
    offer on older connections is still fetched.
    """

    def __init__(self, direct: Any):
        self._direct = direct
        self._is_open = False
        self._transports: list[str] = []
        self._no_devices: str | None = None
        self._allocate: Callable[[int], Any] | None = None
        self._has_devices = False
        self._warned = False
        self._failures = 0
        #: What has not failed.
        self.usable = True
        self.moves_devices = True

    @property
    def key(self) -> bytes:
        """This process's key (`KEY`)."""
        return bytes(self._direct.plane_key())

    def takes_devices(self) -> bool:
        """Whether this process has device memory that others may send to."""
        # A context may still be made: the next connection asks again.
        self._has_devices = self._has_devices or (
            setting("distributed.comm.direct.devices", True)
            and self._direct.has_context()
            and importlib.util.find_spec("rmm") is not None
        )
        return self._has_devices and self.usable and self.moves_devices

    def takes_host(self, elsewhere: bool) -> bool:
        """Whether large frames of host memory come over UCX, from a peer `elsewhere` or here."""
        if self._forced():
            return self._opens()
        if not elsewhere or _lane() != "auto" or not _has_rdma() or not self._opens():
            return False
        return self.is_good(self._transports)

    def opens_for_devices(self) -> bool:
        """Opens what device memory needs, at the first call; False if there is none that knows CUDA,
        which a warning says."""
        if not self.moves_devices or not self._opens():
            return False
        if self._no_devices is None and self._allocate is None:
            try:
                self._allocate = _allocator()
            except ImportError as error:
                self._no_devices = str(error)
        if self._no_devices is not None:
            self.moves_devices = False
            logger.warning("direct:// moves device memory through host memory: %s", self._no_devices)
        return self.moves_devices

    def _opens(self) -> bool:
        if not self._is_open and self.usable:
            try:
                opened = self._direct.open_plane(_library())
            except (OSError, RuntimeError) as error:
                self._give_up(error)
            else:
                version, self._transports, self._no_devices, exposed = opened
                self._is_open = True
                transports = ", ".join(self._transports)
                logger.info("direct:// uses UCX %s with %s", version, transports)
                if exposed is not None:
                    logger.warning("%s", exposed)
        return self._is_open and self.usable

    def _forced(self) -> bool:
        return _lane() == "ucx"

    def is_good(self, ways: list[str]) -> bool:
        """Whether UCX's transports, or its lanes to a peer, are better than a socket for host memory:
        if not, a warning says so once."""
        good = self._forced() or any(map(is_rdma, ways))
        if not good and not self._warned:
            self._warned = True
            logger.warning(
                "direct:// sends large frames to other machines over sockets: a port of RDMA is active "
                "here, but UCX uses %s",
                ", ".join(ways) or "nothing that it names",
            )
        return good

    def worked(self) -> None:
        """A transfer has arrived."""
        self._failures = 0

    def failed(self, why: object) -> None:
        """A transfer has failed on a connection that lives: its peer may be about to end, or UCX does
        not work."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._give_up(why)

    def _give_up(self, why: object) -> None:
        if self.usable:
            logger.warning(
                "direct:// does without UCX: device memory goes through host memory, and frames to "
                "other machines over sockets: %s",
                why,
            )
        self.usable = False

    def offer(
        self, connection: Any, events: Any, frames: list[Any], host: bool, peer: bytes
    ) -> tuple[list[Any], Any]:
        """The frames as they go over the connection, a description of the others as the last of
        them; and what offers those, if there are any. `host` says whether large frames of host
        memory are among them; `peer` is the other end's key."""
        own = {
            at: (frame, place(frame))
            for at, frame in enumerate(frames)
            if is_device(frame) or (host and memoryview(frame).nbytes >= LARGE)
        }
        if not own or not self._is_open:
            return [*frames, b""], None
        transfer = self._direct.offer(connection, events, list(own.values()))
        sizes = [
            (at, on_device is not None, on_device[1] if on_device else memoryview(frame).nbytes)
            for at, (frame, on_device) in own.items()
        ]
        description = msgpack.packb((self._direct.address_for(peer), transfer.id, sizes))
        return [*(b"" if at in own else frame for at, frame in enumerate(frames)), description], transfer

    def fetch(self, connection: Any, events: Any, frames: list[Any], peer: bytes) -> Any:
        """Takes the description from a message, and puts memory for what it describes into it; what
        fills that from the peer, if there is anything to fill. `peer` is the other end's key."""
        description = frames.pop()
        if not len(description):
            return None
        if not self._opens():
            raise ConnectionError("UCX cannot fetch what the peer offers")
        own = []
        try:
            address, number, sizes = msgpack.unpackb(description)
            for at, on_device, length in sizes:
                memory = self._memory(on_device, length)
                frames[at] = memory if on_device else memoryview(memory)
                own.append((memory, place(memory)))
            return self._direct.fetch(connection, events, address, peer, number, own)
        except WRONG as error:
            raise ConnectionError(f"the frames that the peer offers cannot be taken: {error}") from error

    def _memory(self, on_device: bool, length: int) -> Any:
        if not on_device:
            return self._direct.memory(length)
        if not self.opens_for_devices() or self._allocate is None:
            raise ConnectionError("a frame is in device memory, which this process cannot fetch")
        return self._allocate(length)


_process: int | None = None
_plane: _Plane | None = None


def of_this_process(direct: Any) -> _Plane:
    """What this process moves over UCX."""
    global _process, _plane
    if _plane is None or _process != os.getpid():
        _process, _plane = os.getpid(), _Plane(direct)
    return _plane


def is_device(frame: Any) -> bool:
    return hasattr(frame, "__cuda_array_interface__")


def is_rdma(lane: str) -> bool:
    """Whether a transport or lane of UCX's is one over RDMA."""
    return lane.startswith(RDMA)


def place(frame: Any) -> tuple[int, int, int | None] | None:
    """Address, length in bytes, and stream of device memory; None for host memory."""
    if not is_device(frame):
        return None
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


def _lane() -> str:
    return str(setting("distributed.comm.direct.route", "auto"))


def _has_rdma() -> bool:
    """Whether a port of an RDMA device is active."""
    for state in PORTS.glob("*/ports/*/state"):
        try:
            if "ACTIVE" in state.read_text():
                return True
        except OSError:
            continue
    return False


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
