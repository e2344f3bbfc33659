"""What this package uses of Dask beyond its documentation. Nothing else in it imports any of that; `SEEN`
also lists the attributes that others read.

*Invariant:* each name is in `SEEN`; tests/python/test_dask_surface.py says which are gone in the Dask that
it is run with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import dask
import dask.system
from distributed import Scheduler, Worker
from distributed.active_memory_manager import RetireWorker
from distributed.comm import Comm, connect, get_address_host, get_address_host_port
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import get_backend
from distributed.compatibility import asyncio_run
from distributed.config import get_loop_factory
from distributed.core import error_message, send_recv
from distributed.deploy.adaptive_core import AdaptiveCore
from distributed.diskutils import WorkSpace
from distributed.metrics import monotonic
from distributed.protocol import pickle, to_serialize
from distributed.spill import SpillBuffer
from distributed.utils import format_dashboard_link, get_ip, get_ip_interface, get_ipv6, import_term
from distributed.versions import get_versions

from cuda_cluster_dask.received import received

__all__ = [
    "AdaptiveCore",
    "Comm",
    "CommClosedError",
    "FatalCommClosedError",
    "RetireWorker",
    "SpillBuffer",
    "WorkSpace",
    "asyncio_run",
    "connect",
    "error_message",
    "format_dashboard_link",
    "get_address_host",
    "get_address_host_port",
    "get_backend",
    "get_ip",
    "get_ip_interface",
    "get_ipv6",
    "get_loop_factory",
    "get_versions",
    "import_term",
    "monotonic",
    "pickle",
    "send_recv",
    "to_serialize",
]

#: By the newest release that had them, modules and classes with their names.
SEEN = {
    "2026.8.0": {
        "dask.config": "collect_env collect_yaml config defaults merge paths update",
        "dask._task_spec": "DataNode Task",
        "dask._task_spec.DataNode": "value",
        "dask._task_spec.Task": "args func kwargs",
        "dask.system": "CPU_COUNT cpu_count",
        "distributed.Scheduler": "workers services http_application http_server _ongoing_background_tasks "
        "extensions rpc handlers running bandwidth tasks valid_workers workers_list get_comm_cost "
        "decide_worker_non_rootish task_prefixes _task_to_msg gather_on_worker replicate unrunnable "
        "_active_graph_updates",
        "distributed.Worker": "rpc scheduler contact_address handlers metrics http_application http_server "
        "state data monitor memory_manager startup_information transfer_outgoing_bytes_total "
        "transfer_incoming_log",
        "distributed.active_memory_manager": "RetireWorker",
        "distributed.active_memory_manager.ActiveMemoryManagerExtension": "policies",
        "distributed.active_memory_manager.RetireWorker": "address no_recipients",
        "distributed.comm": "Comm connect get_address_host get_address_host_port",
        "distributed.comm.Comm": "local_info remote_info",
        "distributed.comm.core": "CommClosedError FatalCommClosedError",
        "distributed.comm.registry": "get_backend",
        "distributed.compatibility": "asyncio_run",
        "distributed.config": "get_loop_factory",
        "distributed.core": "error_message send_recv",
        "distributed.core.ConnectionPool": "available occupied connect reuse",
        "distributed.deploy.adaptive_core": "AdaptiveCore",
        "distributed.diskutils": "WorkSpace",
        "distributed.http.routing.RoutingApplication": "add_application applications",
        "distributed.metrics": "monotonic",
        "distributed.protocol": "pickle to_serialize",
        "distributed.scheduler.TaskPrefix": "duration_average name states state_counts",
        "distributed.scheduler.TaskState": "who_has dependencies processing_on actor key get_nbytes "
        "get_nbytes_deps dependents state prefix worker_restrictions host_restrictions resource_restrictions "
        "run_spec type __weakref__",
        "distributed.scheduler.WorkerState": "name server_id nanny pid address has_what host extra last_seen "
        "nthreads metrics needs_what task_prefix_count _network_occ executing processing status resources",
        "distributed.spill": "SpillBuffer",
        "distributed.spill.SpillBuffer": "spilled_total",
        "distributed.stealing.WorkStealing": "steal_time_ratio",
        "distributed.system_monitor.SystemMonitor": "get_process_memory",
        "distributed.utils": "format_dashboard_link get_ip get_ip_interface get_ipv6 import_term",
        "distributed.versions": "get_versions",
        "distributed.worker_memory.WorkerMemoryManager": "memory_limit memory_target_fraction "
        "memory_spill_fraction",
        "distributed.worker_state_machine.TaskState": "key nbytes waiters",
        "distributed.worker_state_machine.WorkerState": "executed_count tasks",
    },
}

# Why `distributed` closes a worker that is not wanted any more. A reason of another name would make it
# one that died.
CLUSTER_ENDS = "scheduler-close"
UNWANTED = (CLUSTER_ENDS, "scheduler-close-worker", "worker-close")
LIFETIME = "worker-lifetime-reached"

# Why it closes one that the scheduler has removed: it was told so, or its heartbeat found out first.
REMOVED = ("scheduler-remove-worker", "worker-heartbeat-missing")

#: What it means that a worker is closed so.
IN_WORDS = {
    CLUSTER_ENDS: "the scheduler at {} ended",
    "scheduler-close-worker": "the scheduler at {} closed the worker",
}

#: How a nanny tells the scheduler of itself, and where in the answer the plugins are that it is to run.
REGISTER_NANNY, NANNY_PLUGINS = "register_nanny", "nanny-plugins"

#: What a nanny is asked.
OF_A_NANNY = ("kill", "restart", "plugin_add", "plugin_remove")


def call_later(scheduler: Scheduler, delay: float, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a coroutine function later, unless the scheduler has closed before."""
    scheduler._ongoing_background_tasks.call_later(delay, function, *arguments)


def dashboard_port(scheduler: Scheduler) -> int:
    """Where the scheduler's pages are, with a dashboard or without."""
    return int(scheduler.services["dashboard"].port)


def task_nodes() -> tuple[type, type]:
    """The classes of a graph's tasks and of its data."""
    from dask._task_spec import DataNode, Task

    return Task, DataNode


def work_of(worker: Worker) -> Callable[[], dict[str, object]]:
    """Says what a worker has done until now, and from whom it has received what (`work` and
    `received_from` of `wire::status::Condition` in Rust)."""
    began = time.monotonic()

    def work() -> dict[str, object]:
        at_ms = int((time.monotonic() - began) * 1000)
        done = {"at_ms": at_ms, "tasks": int(worker.state.executed_count)}
        # Dask's configuration may have it keep no log.
        if worker.transfer_incoming_log.maxlen != 0:
            done["received_bytes"] = received.total
        # Not of every storage, such as a user's own.
        spilled = getattr(worker.data, "spilled_total", None)
        if spilled is not None:
            done["spilled_bytes"] = int(spilled.disk)
        return {"work": done, "received_from": received.by_sender}

    return work


def sent_bytes(worker: Worker) -> int:
    """What it has sent until now, to workers and to clients: a count that Dask's heartbeats lack."""
    return int(worker.transfer_outgoing_bytes_total)


def connections(worker: Worker) -> dict[str, Comm]:
    """One open connection to each process that the worker has connected to."""
    held = (worker.rpc.available, worker.rpc.occupied)
    return {
        address: comm
        for by_address in held
        for address, comms in by_address.items()
        for comm in comms
        if not comm.closed()
    }


def ucx_endpoint(comm: Comm) -> int | None:
    """The handle of UCX's endpoint, if the connection is distributed-ucxx's (seen in 0.52)."""
    endpoint: int | None = getattr(comm, "_ep_handle", None)
    return endpoint


def open_ucx(protocol: str) -> None:
    """Has distributed-ucxx open UCX (seen in 0.52)."""
    sys.modules[type(get_backend(protocol)).__module__].init_once()


def refresh_configuration(files: list[dict[str, Any]]) -> None:
    """What `dask.config.refresh` does, from files that have been read; for the CPUs of this process."""
    dask.config.config.clear()
    for defaults in dask.config.defaults:
        dask.config.update(dask.config.config, defaults, priority="old")
    dask.config.update(dask.config.config, dask.config.merge(*files, dask.config.collect_env()))
    dask.system.CPU_COUNT = dask.system.cpu_count()


def configuration_files() -> list[dict[str, Any]]:
    """Dask's configuration, file by file."""
    return list(dask.config.collect_yaml(dask.config.paths))
