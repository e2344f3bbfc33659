"""One connection of ``direct://``: messages out of frames, and frames out of messages.

*Invariant:* who is cancelled or fails in the middle of a message ends the connection.
"""

from __future__ import annotations

import logging
from typing import Any

from cuda_cluster import _plane
from cuda_cluster._extension import comm as _comm
from cuda_cluster._internals import (
    Comm,
    CommClosedError,
    ensure_memoryview,
    from_frames,
    nbytes,
    to_frames,
)
from cuda_cluster._loop import Loop

logger = logging.getLogger("cuda_cluster.comm")

#: Whether it has been said that frames are not copied from process to process.
_warned = False

#: Frames are not split: nothing here limits their size.
UNSPLIT = 1 << 62


def _warn(connection: Any) -> None:
    """Says once that the system does not let processes read each other's memory."""
    global _warned
    if _warned or not (why := connection.refused):
        return
    _warned = True
    way = "through memory that both map" if connection.routes[2] else "over Unix sockets"
    logger.warning(
        "direct:// may not read the memory of its peers; large frames go %s instead; hint: %s",
        way,
        why,
    )


class _Ended:
    """What is left of a connection when this end has closed it: nothing, not even its socket."""

    closed = flushed = True
    host = ""

    def __init__(self, connection: Any):
        self.id = connection.id

    def receive(self) -> Any:
        raise ConnectionError("this process has closed the connection")

    def send(self, frames: Any) -> Any:
        raise ConnectionError("this process has closed the connection")

    @property
    def routes(self) -> Any:
        raise ConnectionError("this process has closed the connection")

    def abort(self) -> None:
        pass


class Direct(Comm):
    """An established connection."""

    def __init__(self, connection: Any, loop: Loop, local: str, peer: str, deserialize: bool = True):
        self._connection = connection
        self._loop = loop
        self._local_addr = local
        self._peer_addr = peer
        self._closed = False
        #: What has carried the last frames that came by UCX.
        self._lanes: list[str] = []
        #: Whether UCX may carry frames of host memory, as far as is known.
        self._by_ucx = True
        super().__init__(deserialize=deserialize)
        _warn(connection)

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    @property
    def extra_info(self) -> dict[str, Any]:
        """How messages travel: ``socket`` is "unix" or "tcp"; ``copies`` says for each direction
        (received, sent) whether large frames may be copied from process to process, ``maps`` whether
        they may be written to memory that both have mapped; ``devices`` and ``ucx`` have UCX's lanes for
        memory of devices and of the host, once some has come, and are None where UCX is not used."""
        try:
            *copies, maps = self._connection.routes
        except OSError:
            return {}
        # The ends of a TCP connection have ports; those that connected over a Unix socket do not.
        unix = self._peer_addr.endswith(":0") or self._local_addr.endswith(":0")
        info = {"socket": "unix" if unix else "tcp", "copies": tuple(copies), "maps": maps}
        agreed = {"devices": self._agreed(_plane.DEVICES), "ucx": self._agreed(_plane.HOST)}
        return {**info, **{key: self._lanes if agreed[key] else None for key in agreed}}

    def handshake_info(self) -> dict[str, Any]:
        plane = _plane.of_this_process(_comm)
        try:
            elsewhere = not any(self._connection.routes)
        except OSError:
            elsewhere = False
        return {
            **super().handshake_info(),
            # Who only passes messages on, as a scheduler does, gets them in host memory.
            _plane.DEVICES: self.deserialize and plane.takes_devices(),
            _plane.HOST: plane.takes_host(elsewhere),
            _plane.KEY: plane.key,
        }

    def _agreed(self, what: str) -> bool:
        """Whether both ends have said that they take this over UCX."""
        agreed = self.local_info.get(what) and self.remote_info.get(what)
        return bool(agreed and self._peer_key is not None)

    @property
    def _peer_key(self) -> bytes | None:
        """The other end's key, if that is one."""
        key = self.remote_info.get(_plane.KEY)
        return key if isinstance(key, bytes) and len(key) == 32 else None

    @property
    def _plane(self) -> Any:
        """What moves frames over UCX, if any are to be moved."""
        if self._agreed(_plane.DEVICES) or self._agreed(_plane.HOST):
            return _plane.of_this_process(_comm)
        return None

    async def read(self, deserializers: Any = None) -> Any:
        try:
            while (frames := self._connection.receive()) is None:
                await self._loop.wait(self._connection.id)
            if (plane := self._plane) is not None:
                await self._over(plane.fetch(self._connection, self._loop.events, frames, self._peer_key))
        except OSError as error:
            self._fail(error)
        except BaseException:
            # Who is cancelled may have taken a message, which then is lost.
            self.abort()
            raise
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except EOFError as error:
            self.abort()
            raise CommClosedError("aborted connection on truncated data") from error

    async def _to_frames(self, msg: Any, serializers: Any, on_error: str, devices: bool) -> Any:
        if devices:
            serializers = serializers or _plane.SERIALIZERS
        elif serializers is not None:
            serializers = tuple(one for one in serializers if one != "cuda")
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
            frame_split_size=UNSPLIT,
        )
        return [_flat(frame) for frame in frames]

    async def _over(self, transfer: Any) -> None:
        """Waits for the end of a transfer over UCX, if there is one."""
        if transfer is None:
            return
        try:
            while not transfer.done:
                await self._loop.wait(transfer.id)
        except OSError as error:
            if not self._connection.closed and self._plane is not None:
                self._plane.failed(error)
            raise
        _plane.of_this_process(_comm).worked()
        self._lanes = transfer.lanes
        if self._agreed(_plane.HOST) and self._by_ucx:
            self._by_ucx = self._plane.is_good(self._lanes)

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        if self.closed():
            raise CommClosedError(f"in {self}: it is closed")
        plane = self._plane
        devices = self._agreed(_plane.DEVICES) and plane.takes_devices()
        frames = await self._to_frames(msg, serializers, on_error, devices)
        if any(map(_plane.is_device, frames)) and not plane.opens_for_devices():
            frames = await self._to_frames(msg, serializers, on_error, False)
        sent, transfer = frames, None
        try:
            if plane is not None:
                host = self._agreed(_plane.HOST) and self._by_ucx and plane.usable
                own = (self._connection, self._loop.events)
                sent, transfer = plane.offer(*own, frames, host, self._peer_key)
            held = self._connection.send(sent)
            while held is not None and not held.done:
                await self._loop.wait(self._connection.id + 1)
            if held is not None and held.lost:
                raise ConnectionError("it ended before the peer had the message")
            await self._over(transfer)
        except OSError as error:
            self._fail(error)
        except BaseException:
            # The peer may have part of the message.
            self.abort()
            raise
        return sum(map(nbytes, frames))

    def _fail(self, error: OSError) -> None:
        self.abort()
        raise CommClosedError(f"in {self}: {error}") from error

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                while not self._connection.flushed:
                    await self._loop.wait(self._connection.id + 1)
            except OSError:
                pass
            finally:
                self.abort()

    def abort(self) -> None:
        self._closed = True
        connection, self._connection = self._connection, _Ended(self._connection)
        connection.abort()

    def closed(self) -> bool:
        return self._closed or self._connection.closed


def _flat(frame: Any) -> Any:
    """A frame of one dimension: arrays of none have buffers of none, and some are not contiguous."""
    if isinstance(frame, memoryview) and (frame.ndim != 1 or not frame.c_contiguous):
        return ensure_memoryview(frame)
    return frame
