"""Which port is free to listen on, and who holds one that is not."""

from __future__ import annotations

import os
import socket

from cuda_cluster_fork.failure import StartFailure
from cuda_cluster_dask.settings import Settings

#: The first release whose HTTP server takes an IPv6 address (`distributed.node`).
IPV6_DASHBOARD = (2025, 11)

LISTENING = "0A"  # TCP_LISTEN, in the fourth column of /proc/net/tcp, proc(5).


def free(settings: Settings, ports: tuple[int, int], required: bool) -> int:
    """The first free port of the range `ports`; 0, which is any, if none is and none is required.

    Raises StartFailure naming who holds the ports.
    """
    return _first_free(*_place(settings), ports, required)


def is_free(settings: Settings, port: int) -> bool:
    return is_free_at(*_place(settings), port)


def _place(settings: Settings) -> tuple[str | None, bool]:
    """The host to listen on, and whether closed connections leave a port free."""
    plan = settings["plan"]
    if plan["protocol"].startswith("ucx"):
        # Its listener is on every address, whatever the host is (distributed#6901), and takes a
        # port that closed connections still hold only if it is told to.
        return None, os.environ.get("UCX_TCP_CM_REUSEADDR", "n")[:1] in ("y", "1")
    if plan["host"] is None and plan["interface"] is not None:
        from cuda_cluster_dask import internals

        return internals.get_ip_interface(plan["interface"]), True
    return plan["host"], True


def dashboard_address(address: str) -> str | tuple[str, int]:
    """Where a dashboard listens. Dask takes an IPv6 address apart at its colons, unless it comes as
    a pair.

    Raises StartFailure where Dask can't listen there.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        import distributed

        if tuple(map(int, distributed.__version__.split(".")[:2])) < IPV6_DASHBOARD:
            version, since = distributed.__version__, ".".join(map(str, IPV6_DASHBOARD))
            raise StartFailure(f"Dask {version} can't listen at {host}: IPv6 needs Dask {since} or newer")
        return host[1:-1], int(port)
    return address


def _first_free(host: str | None, reuse: bool, ports: tuple[int, int], required: bool) -> int:
    low, high = ports
    busy = []
    for port in range(low, high + 1):
        if port == 0 or is_free_at(host, reuse, port):
            return port
        busy.append(port)
    if not required:
        return 0
    holders = ", ".join(f"port {port} is held by {holder(port)}" for port in busy[:4])
    more = f", and {len(busy) - 4} more" if len(busy) > 4 else ""
    raise StartFailure(f"no free port to listen on: {holders}{more}")


def is_free_at(host: str | None, reuse: bool, port: int) -> bool:
    host = host and host.strip("[]")
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            probe.bind((host or "", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """`python3 (pid 123)`, or what little can be said of somebody else's process."""
    inodes = _listeners(port)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.removeprefix("socket:[").removesuffix("]") in inodes:
                    return f"{_name(pid)} (pid {pid})"
        except OSError:
            continue  # Ended meanwhile, or another user's.
    return "a process that is not visible here" if inodes else "connections closed a moment ago"


def _listeners(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                inodes.add(row[9])
    return inodes


def _name(pid: str) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
