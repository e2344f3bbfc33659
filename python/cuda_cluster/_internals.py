"""What this package uses of Dask beyond its documentation. Nothing else in it imports any of that; `SEEN`
also lists the attributes that others read.

*Invariant:* each name is in `SEEN`; tests/python/test_dask_surface.py says which are gone in the Dask that
it is run with. (`cuda_cluster_dask.internals` is the same for what runs in a cluster's processes.)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client
from distributed.comm import Comm
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import BaseListener, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import BaseTCPBackend, RequireEncryptionMixin
from distributed.comm.tcp import _getaddrinfo as getaddrinfo
from distributed.comm.utils import ensure_concrete_host, from_frames, to_frames
from distributed.deploy import Cluster
from distributed.objects import SchedulerInfo
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from distributed.system import MEMORY_LIMIT
from distributed.utils import (
    NoOpAwaitable,
    ensure_memoryview,
    import_term,
    nbytes,
    parse_ports,
    silence_logging_cmgr,
)
from distributed.versions import get_versions
from distributed.worker_memory import WorkerMemoryManager

__all__ = [
    "CPU_COUNT",
    "MEMORY_LIMIT",
    "BaseListener",
    "BaseTCPBackend",
    "Cluster",
    "Comm",
    "CommClosedError",
    "Connector",
    "FatalCommClosedError",
    "NoOpAwaitable",
    "RequireEncryptionMixin",
    "SchedulerInfo",
    "WorkerMemoryManager",
    "backends",
    "ensure_concrete_host",
    "ensure_memoryview",
    "from_frames",
    "get_versions",
    "getaddrinfo",
    "import_serializers",
    "import_term",
    "nbytes",
    "parse_host_port",
    "parse_ports",
    "silence_logging_cmgr",
    "to_frames",
    "unparse_host_port",
]

#: By the newest release that had them, modules and classes with their names.
SEEN = {
    "2026.8.0": {
        "dask.system": "CPU_COUNT",
        "distributed.Client": "_instances _handle_report _handle_report_task _close _ensure_connected "
        "_timeout rpc",
        "distributed.client": "_global_clients",
        "distributed.comm": "Comm",
        "distributed.comm.Comm": "handshake_options handshake_info local_info remote_info",
        "distributed.comm.addressing": "parse_host_port unparse_host_port",
        "distributed.comm.core": "BaseListener CommClosedError Connector FatalCommClosedError",
        "distributed.comm.registry": "backends",
        "distributed.comm.tcp": "BaseTCPBackend RequireEncryptionMixin _getaddrinfo",
        "distributed.comm.utils": "ensure_concrete_host from_frames to_frames",
        "distributed.deploy": "Cluster",
        "distributed.deploy.Cluster": "scheduler_comm scheduler_info periodic_callbacks "
        "_cluster_manager_logs _loop_runner _start _close _update_worker_status _repr_html_",
        "distributed.objects": "SchedulerInfo",
        "distributed.protocol.cuda": "cuda_deserialize cuda_serialize",
        "distributed.protocol.serialize": "dask_deserialize dask_serialize",
        "distributed.protocol.serialize.dask_serialize": "_lazy dispatch",
        "distributed.system": "MEMORY_LIMIT",
        "distributed.utils": "NoOpAwaitable ensure_memoryview import_term nbytes parse_ports silence_logging_cmgr",
        "distributed.versions": "get_versions",
        "distributed.worker.Worker": "nanny",
        "distributed.worker_memory": "WorkerMemoryManager",
        "distributed.worker_memory.WorkerMemoryManager": "memory_limit memory_monitor_interval "
        "memory_target_fraction memory_spill_fraction memory_pause_fraction",
        "distributed.worker_state_machine.WorkerState": "transfer_message_bytes_limit",
    },
}


def clients_of(cluster: Any) -> list[Client]:
    """The clients of a cluster object."""
    return [client for client in list(Client._instances) if client.cluster is cluster]


def open_clients() -> list[Client]:
    """All clients of this process, at its end too."""
    return list(getattr(sys.modules["distributed.client"], "_global_clients", {}).values())


async def connect_again(client: Client, address: str | None) -> None:
    """Connects a client, which waits for a connection to another address; raises OSError."""
    client._handle_report_task.cancel()
    await asyncio.wait([client._handle_report_task])
    client.scheduler = client.rpc(address)
    await client._ensure_connected(timeout=client._timeout)
    client._handle_report_task = asyncio.create_task(client._handle_report())


async def give_up(client: Client) -> None:
    """Closes a client from its own loop."""
    await client._close()


def register_lazily(libraries: tuple[str, ...], register: Callable[[], None]) -> None:
    """Has `register` register the serializers of libraries, for which something else does so."""
    for registry in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        for library in libraries:
            if library in registry._lazy:
                registry._lazy[library] = register


def import_serializers(kind: type) -> None:
    """Has Dask import what serializes a type, which it does when it meets the type."""
    dask_serialize.dispatch(kind)
