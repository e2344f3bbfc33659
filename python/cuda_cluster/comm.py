"""``direct://``, a communication backend for ``distributed``.

Dask finds it by its entry point::

    LocalCluster(protocol="direct")
    dask scheduler --protocol direct
    dask worker direct://127.0.0.1:8786

On one machine, large frames go from process to process with one copy, into memory that is used
again: the receiver copies them (``process_vm_readv``), or the sender writes them to memory that both
have mapped, whichever is there and faster. Between machines, messages go over TCP, as with ``tcp://``;
where both have active RDMA ports, large frames go over UCX (``rc``). Between processes with GPUs, frames in
device memory go over UCX (``cuda_ipc``, ``rc``), from device to device; a process needs RMM for that, and a
CUDA context before it connects. `UCX_*` variables say what UCX may use.
It does not encrypt: where Dask requires encryption, use ``tls://``.

Configuration, under ``distributed.comm.direct``:

``secret-file``
    A file with 64 hexadecimal digits that is not open to all users. If set, both ends of every TCP connection must know the secret.
    Connections of one user's processes on one machine need none: the kernel tells who they are.
``route``
    How large frames travel: "auto", or on one machine only "mapped", "copied" or "socket", or
    everywhere "ucx".
``devices``
    Whether device memory goes over UCX; if false, through host memory.
``keep-memory``
    How much memory a process keeps for later messages, and how much it shares at most (an eighth of
    the machine's and of the worker's memory limit, at most 512 MiB). When a worker has nearly as much
    memory as lets Dask spill, it keeps none.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib.machinery
import importlib.util
import logging
import os
import socket
import stat
import sys
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dask.utils import parse_timedelta
import tornado.netutil as netutil

from cuda_cluster import _addresses, _limits, _plane, _refusals, _settings
from cuda_cluster._addresses import PREFIX
from cuda_cluster._internals import (
    BaseListener,
    BaseTCPBackend,
    Comm,
    CommClosedError,
    Connector,
    FatalCommClosedError,
    RequireEncryptionMixin,
    backends,
    ensure_concrete_host,
    ensure_memoryview,
    from_frames,
    getaddrinfo,
    nbytes,
    to_frames,
    unparse_host_port,
)
from cuda_cluster._settings import setting

logger = logging.getLogger(__name__)

#: Whether it has been said that frames are not copied from process to process.
_warned = False

#: Frames are not split: nothing here limits their size.
UNSPLIT = 1 << 62


def _load() -> Any:
    """The Rust part: beside this file where it was installed, or as built in the source tree."""
    name = "cuda_cluster._comm"
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    target = Path(__file__).resolve().parents[2] / "target"
    named = os.environ.get("CUDA_CLUSTER_COMM")
    built = [target / profile / "lib_comm.so" for profile in ("release", "debug")]
    found = [path for path in ([Path(named)] if named else built) if path.exists()]
    if not found:
        raise ImportError(
            f"direct:// needs {name}, which is not here; "
            "hint: cargo build --release -p cuda-cluster-comm, or name it in CUDA_CLUSTER_COMM"
        )
    path = str(max(found, key=lambda path: path.stat().st_mtime))
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


_comm = _load()


def check() -> None:
    """Raises TypeError or ValueError where the configuration is wrong, by the name of its key."""
    _settings.check()
    _of_connection()


def _of_connection() -> dict[str, Any]:
    timeout = setting("distributed.comm.timeouts.tcp")
    return {
        "secret": _secret(setting("distributed.comm.direct.secret-file")),
        "tcp_timeout": float(parse_timedelta(timeout, default="seconds")),
        # What UCX does not carry goes over sockets.
        "route": str(setting("distributed.comm.direct.route", "auto")).replace("ucx", "socket"),
    }


def _secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
        secret = bytes.fromhex(text.strip())
    except OSError as error:
        raise ValueError(
            f"{path} can't be read: {error.strerror}; "
            "hint: distributed.comm.direct.secret-file names it"
        ) from error
    except ValueError:
        secret = b""
    if stat.S_ISREG(mode) and mode & 0o007:
        # Whoever knows the secret can run code in this process. A group may share one.
        raise ValueError(f"{path} is open to all users; hint: chmod 600 {path}")
    if len(secret) != 32:
        raise ValueError(
            f"{path} is not a secret: 64 hexadecimal digits; "
            "hint: distributed.comm.direct.secret-file names it"
        )
    return secret


class _Loop:
    """What one event loop waits for."""

    loops: weakref.WeakKeyDictionary[Any, _Loop] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.process = os.getpid()
        self.events = _comm.Events()
        self.handlers: dict[int, Callable[[], None]] = {}
        loop.add_reader(self.events.fileno(), self._on_events)

    @classmethod
    def running(cls) -> _Loop:
        loop = asyncio.get_running_loop()
        found = cls.loops.get(loop)
        if found is None or found.process != os.getpid():
            _limits.bound(_comm)
            found = cls.loops[loop] = cls(loop)
        return found

    def _on_events(self) -> None:
        handlers = self.handlers
        for event in self.events.take():
            handler = handlers.get(event)
            if handler is not None:
                handler()

    async def wait(self, event: int) -> None:
        """Waits for an event, which must have been asked for."""
        future = asyncio.get_running_loop().create_future()
        self.handlers[event] = functools.partial(_resolve, future)
        try:
            await future
        finally:
            self.handlers.pop(event, None)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def received() -> dict[str, int]:
    """Bytes of frames that this process has received, by the way that they took."""
    host = dict(zip(("copied", "mapped", "socket"), _comm.received(), strict=True))
    return {**host, **dict(zip(("ucx", "device"), _comm.fetched(), strict=True))}


def metrics(worker: Any) -> dict[str, int]:
    """For `Worker.metrics`: what has been received, and the memory that is kept and shared."""
    own, written = _comm.shared_memory()
    memory = {"kept": _comm.kept_memory(), "shared": own, "written": written}
    return {**received(), **memory}


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

    def __init__(
        self, connection: Any, loop: _Loop, local: str, peer: str, deserialize: bool = True
    ):
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


def _socket_name(host: str, port: int) -> str:
    """The Unix socket of who listens on this address: in the abstract namespace, which the
    processes share that share the address. The kernel says who is at its other end: anybody may have
    taken the name."""
    return f"\0cuda-cluster-comm/{os.geteuid()}/{host}/{port}"


def _is_local(family: int, host: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _connect_unix(names: list[str]) -> socket.socket | None:
    for name in names:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(name)
            if _comm.is_of_this_user(sock.fileno()):
                return sock
        except OSError:
            pass  # Nobody listens there, or its backlog is full.
        sock.close()
    return None


class DirectConnector(Connector, RequireEncryptionMixin):
    prefix = PREFIX
    encrypted = False

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> Direct:
        self._check_encryption(address, connection_args)
        host, port = _addresses.of_peer(address)
        error: OSError | None = None
        for family, _, _, _, place in await getaddrinfo(host, port, family=socket.AF_UNSPEC):
            try:
                await _refusals.pause(PREFIX + address)
                comm = await self._connect(family, place, address, deserialize)
                _refusals.forget(PREFIX + address)
                return comm
            except FatalCommClosedError:
                raise
            except OSError as failure:
                error = failure
        raise CommClosedError(f"cannot connect to {PREFIX}{address}: {error}") from error

    async def _connect(self, family: int, place: Any, address: str, deserialize: bool) -> Direct:
        host, port = place[:2]
        names = [_socket_name(host, port)]
        if _is_local(family, host):
            names.append(_socket_name("0.0.0.0" if family == socket.AF_INET else "::", port))
        sock = _connect_unix(names)
        unix = sock is not None
        if sock is None:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, place)
            except BaseException:
                sock.close()
                raise
        loop = _Loop.running()
        connection = _comm.connect(sock.detach(), loop.events, host=host, **_of_connection())
        try:
            while not connection.open:
                await loop.wait(connection.id)
            local = (host, 0) if unix else connection.addresses[0]
        except PermissionError as error:
            _refusals.note(PREFIX + address, str(error))
            raise FatalCommClosedError(f"cannot connect to {PREFIX}{address}: {error}") from error
        except ConnectionError as error:
            connection.abort()
            _refusals.note_wordless(PREFIX + address, str(error))
            raise
        except BaseException:
            connection.abort()
            raise
        own = PREFIX + unparse_host_port(*local)
        return Direct(connection, loop, own, PREFIX + address, deserialize)


class DirectListener(BaseListener, RequireEncryptionMixin):
    prefix = PREFIX
    encrypted = False

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[Comm], Awaitable[None]],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ):
        super().__init__()
        self._check_encryption(address, connection_args)
        self.ip, self.port = _addresses.to_listen(address, default_port)
        self.default_host = default_host
        self.comm_handler = comm_handler
        self.deserialize = deserialize
        self.allow_offload = allow_offload
        self._listeners: list[Any] = []
        self._loop: _Loop | None = None
        self._bound: tuple[str, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        backlog = setting("distributed.comm.socket-backlog")
        settings = _of_connection()
        sockets = self._bind(backlog)
        # If on IPv4 and IPv6, the address is that of IPv4, as with TCP.
        sockets.sort(key=lambda sock: sock.family != socket.AF_INET)
        self._bound = sockets[0].getsockname()[:2]
        self._loop = _Loop.running()
        _limits.follow(getattr(self.comm_handler, "__self__", None), _comm)
        for sock in sockets:
            for each in (sock, _listen_unix(sock, backlog)):
                if each is None:
                    continue
                each.setblocking(False)
                listener = _comm.listen(each.detach(), self._loop.events, **settings)
                self._loop.handlers[listener.id] = functools.partial(self._accept, listener)
                self._listeners.append(listener)

    def _bind(self, backlog: int) -> list[socket.socket]:
        for attempt in range(5):
            try:
                return netutil.bind_sockets(self.port, address=self.ip, backlog=backlog)
            except OSError as error:
                # A free port may be taken between the addresses of a host.
                if self.port != 0 or error.errno != errno.EADDRINUSE or attempt == 4:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def stop(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
            if self._loop is not None:
                self._loop.handlers.pop(listener.id, None)

    def _accept(self, listener: Any) -> None:
        _refusals.tell(self.listen_address, listener.refused())
        for connection in listener.accept():
            task = asyncio.ensure_future(self._handle(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, connection: Any) -> None:
        assert self._loop is not None
        if not self._listeners:
            connection.abort()
            return
        try:
            local, peer = connection.addresses
        except OSError:
            # A Unix socket: who connected has no port, and its host is this one.
            host = connection.host or self.get_host_port()[0]
            local, peer = (host, self.get_host_port()[1]), (host, 0)
        own, other = (PREFIX + unparse_host_port(*end) for end in (local, peer))
        comm = Direct(connection, self._loop, own, other, self.deserialize)
        comm.allow_offload = self.allow_offload
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("Connection from %s closed before handshake completed", other)
            return
        await self.comm_handler(comm)

    def get_host_port(self) -> tuple[str, int]:
        if self._bound is None:
            raise ValueError("invalid operation on non-started DirectListener")
        return self._bound

    @property
    def listen_address(self) -> str:
        return PREFIX + unparse_host_port(*self.get_host_port())

    @property
    def contact_address(self) -> str:
        host, port = self.get_host_port()
        host = ensure_concrete_host(host, default_host=self.default_host)
        return PREFIX + unparse_host_port(host, port)


def _listen_unix(sock: socket.socket, backlog: int) -> socket.socket | None:
    """A Unix socket for who connects from this machine."""
    host, port = sock.getsockname()[:2]
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.bind(_socket_name(host, port))
        unix.listen(backlog)
    except OSError as error:
        unix.close()
        logger.warning("direct:// has no Unix socket for %s:%s, and uses TCP: %s", host, port, error)
        return None
    return unix


class DirectBackend(BaseTCPBackend):
    _connector_class = DirectConnector
    _listener_class = DirectListener


backends.setdefault("direct", DirectBackend())
