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

Where all listen on a loopback address, a worker asks another for 300 MB at once rather than Dask's 50
(``distributed.worker.transfer.message-bytes-limit``); any other number there holds.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any

from dask.utils import parse_timedelta
import tornado.netutil as netutil

from cuda_cluster import _addresses, _limits, _refusals, _settings
from cuda_cluster._addresses import PREFIX
from cuda_cluster._connection import Direct
from cuda_cluster._extension import comm as _comm
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
    getaddrinfo,
    unparse_host_port,
)
from cuda_cluster._loop import Loop
from cuda_cluster._settings import setting

logger = logging.getLogger(__name__)


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
            f"{path} can't be read: {error.strerror}; hint: distributed.comm.direct.secret-file names it"
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


def received() -> dict[str, int]:
    """Bytes of frames that this process has received, by the way that they took."""
    host = dict(zip(("copied", "mapped", "socket"), _comm.received(), strict=True))
    return {**host, **dict(zip(("ucx", "device"), _comm.fetched(), strict=True))}


def metrics(worker: Any) -> dict[str, int]:
    """For `Worker.metrics`: what has been received, and the memory that is kept and shared."""
    own, written = _comm.shared_memory()
    memory = {"kept": _comm.kept_memory(), "shared": own, "written": written}
    return {**received(), **memory}


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

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Direct:
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
        loop = Loop.running()
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
        self._loop: Loop | None = None
        self._bound: tuple[str, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        backlog = setting("distributed.comm.socket-backlog")
        settings = _of_connection()
        sockets = self._bind(backlog)
        # If on IPv4 and IPv6, the address is that of IPv4, as with TCP.
        sockets.sort(key=lambda sock: sock.family != socket.AF_INET)
        self._bound = sockets[0].getsockname()[:2]
        self._loop = Loop.running()
        is_loopback = all(ip_address(one.getsockname()[0]).is_loopback for one in sockets)
        _limits.follow(getattr(self.comm_handler, "__self__", None), _comm, is_loopback)
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
