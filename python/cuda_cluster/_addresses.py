"""Addresses of ``direct://``.

*Invariant:* what is no address is a ValueError that names it; a port is never taken for another one.
"""

from __future__ import annotations

from cuda_cluster._internals import parse_host_port

PREFIX = "direct://"

#: The largest port.
MOST = 65535


def of_peer(address: str) -> tuple[str, int]:
    """Host and port of an address to connect to, which comes without the prefix."""
    host, port = _parsed(address, None)
    if not host:
        raise _wrong(address, "it has no host")
    if not port:
        raise _wrong(address, "nobody listens on port 0")
    return host, port


def to_listen(address: str, default_port: int) -> tuple[str, int]:
    """Host and port of an address to listen on: the host may be empty, which is all of this machine,
    and the port 0, which is any."""
    return _parsed(address, default_port)


def _parsed(address: str, default_port: int | None) -> tuple[str, int]:
    try:
        host, port = parse_host_port(address, default_port)
    except ValueError:
        has_port = default_port is not None or ":" in address.rpartition("]")[2]
        raise _wrong(address, "it is not HOST:PORT" if has_port else "it has no port") from None
    if not 0 <= port <= MOST:
        raise _wrong(address, f"a port is at most {MOST}")
    return host, port


def _wrong(address: str, why: str) -> ValueError:
    return ValueError(
        f"{PREFIX}{address} can't be used: {why}; "
        f"hint: write it like {PREFIX}127.0.0.1:8786 or {PREFIX}[::1]:8786"
    )
