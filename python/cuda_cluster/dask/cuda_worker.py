"""`CUDAWorker`: workers on this machine's GPUs that join a scheduler elsewhere.

*Invariant:* the workers end with their Python; wrong keywords are errors before anything starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Generator
from typing import Any

from distributed import Security

from cuda_cluster import accepted, look
from cuda_cluster import cluster as core
from cuda_cluster._internals import Cluster
from cuda_cluster.dask import certificates, client, keywords
from cuda_cluster.dask import relay as relay_module
from cuda_cluster.dask import worker as worker_module
from cuda_cluster._settings import setting
from cuda_cluster.program import Spec

#: What keywords take here. A name is the workers' at the scheduler.
ACCEPTED = {**keywords.ACCEPTED, "name": accepted.NAME}


def translate(given: dict[str, Any]) -> keywords.Request:
    """Translates keywords of `CUDAWorker` into a request; empties `given`."""
    scheduler, file = given.pop("scheduler", None), given.pop("scheduler_file", None)
    if isinstance(scheduler, Cluster):
        given["security"] = given.get("security") or getattr(scheduler, "security", None)
        scheduler = scheduler.scheduler_address
    if scheduler is not None:
        scheduler = accepted.TEXT.take("scheduler", scheduler)
    given |= accepted.taken(given, ACCEPTED)
    threads = given.pop("nthreads", 1)
    if threads < 1:
        raise ValueError("nthreads must be higher than 0.")
    address = scheduler or file or setting("scheduler-address")
    if address is None:
        raise ValueError(
            "No scheduler specified. A scheduler can be specified by passing an address through "
            "the SCHEDULER argument or 'dask.scheduler-address' config option, or by passing the "
            "location of a scheduler file through the --scheduler-file option"
        )
    _check_addresses(given)
    ucx = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
    if address != file and "://" not in address:
        address = f"tcp://{address}"
    protocol, name = given.pop("protocol", None), given.pop("name", None)
    spec = keywords.said(given.get("spec"))
    if protocol is None and "://" in address:
        protocol = address.partition("://")[0]
    flags: dict[str, Any] = {
        "engine": "dask",
        "join": address,
        "threads_per_worker": keywords.unless_said(spec, "threads", threads, 1),
        "python": None if "dask.python" in spec else sys.executable,
        # Not the workers' name: others of this machine may have that at another scheduler.
        "name": None if "name" in spec else core.made_up_name(),
        "worker_name": name,
        "n_workers": given.pop("n_workers", None),
        "protocol": protocol,
    }
    if "memory_limit" in given:
        flags["memory_limit"] = keywords.limit(given.pop("memory_limit"))
    if "device_memory_limit" in given:
        flags["device_memory_limit"] = keywords.limit(given.pop("device_memory_limit"), "auto")
    flags |= keywords.rmm(given)
    for name in (*ucx, "enable_rdmacm"):
        flags[name] = given.pop(name, None)
    if given.pop("enable_cudf_spill", False):
        if setting("cudf-spill-warning", True):
            warnings.warn(
                "cuDF spilling is enabled, please ensure the client and scheduler processes set "
                "`CUDF_SPILL=on` as well. To disable this warning set `DASK_CUDF_SPILL_WARNING=False`.",
                stacklevel=3,
            )
        flags["enable_cudf_spill"] = True
        flags["cudf_spill_stats"] = given.get("cudf_spill_stats")
    given.pop("cudf_spill_stats", None)
    if not given.pop("dashboard", True):
        flags["dashboard"] = False
    dashboard = given.pop("dashboard_address", None)
    if dashboard not in (None, ":0") and flags.get("dashboard") is not False:
        given["worker_dashboard_address"] = dashboard
    resources = given.get("resources")
    if isinstance(resources, str):
        pairs = [pair.partition("=") for pair in resources.replace(",", " ").split()]
        try:
            given["resources"] = {name: float(amount) for name, _, amount in pairs} or None
        except ValueError:
            raise ValueError(f"resources must be like GPU=1,MEM=2e9, not {resources!r}") from None
    for name in ("preload_argv", "preload"):
        given[name] = list(given.get(name) or ()) or None
    security = given.pop("security", None)
    request = keywords.Request(flags)
    # The program's flags of these names are a scheduler's.
    for name in ("host", "interface"):
        value = given.pop(name, None)
        if value is not None:
            request.worker[name] = value
    if security is not None and not isinstance(security, Security):
        raise TypeError("security must be a Security object")
    request.security = security or request.security
    keywords.common(request, given)
    return request


def _check_addresses(given: dict[str, Any]) -> None:
    """Raises ValueError in dask-cuda's words."""
    host, interface = given.get("host"), given.get("interface")
    listen, contact = given.get("listen_address"), given.get("contact_address")
    if interface and host:
        raise ValueError("Can not specify both interface and host")
    if (host or interface) and listen:
        raise ValueError("Cannot specify listen_address when host or interface is given")
    if contact and not listen:
        raise ValueError("Must specify listen_address when contact_address is provided")
    ports = given.get("worker_port")
    if not (listen or ports):
        return
    workers = _gpus(given)
    if listen and workers > 1:
        raise ValueError(
            f"Cannot specify listen_address or contact_address when using multiple GPUs (nprocs={workers})."
        )
    if ports and listen:
        raise ValueError("Cannot specify worker_port when listen_address is given")
    if ports:
        keywords.ports_for(str(ports), workers)


def _gpus(given: dict[str, Any]) -> int:
    """How many workers there will be."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and given.get("gpus") is None:
        return len(visible.split(","))
    known = {name: given[name] for name in ("gpus", "topology", "simulate") if given.get(name)}
    return len(look.plan(engine="dask", **known).workers)


class CUDAWorker:
    """Workers on this machine's GPUs, one each, that join a scheduler: `await CUDAWorker(address)`.

    Takes the keywords of `dask_cuda.CUDAWorker`, and every flag of `cuda-cluster up`. What the
    workers print is shown here as by `LocalCUDACluster`, also for `silence_logs` and `relay`.
    """

    def __init__(
        self,
        scheduler: Any = None,
        host: str | None = None,
        *,
        silence_logs: Any = logging.WARNING,
        relay: bool = True,
        **given: Any,
    ) -> None:
        level = relay_module.level_of(silence_logs)
        self._relayed = level if accepted.SWITCH.take("relay", relay) else None
        self._relay: relay_module.Relay | None = None
        names = ("listen_address", "contact_address")
        asked = {"scheduler": scheduler, "host": host, **{name: given.pop(name, None) for name in names}}
        self._request = translate({**asked, **given})
        client.prepare()
        self._owned: core.Owned | None = None

    def __await__(self) -> Generator[Any, None, CUDAWorker]:
        return self._start().__await__()

    async def _start(self) -> CUDAWorker:
        if self._owned is None:
            flags, specs = prepare(self._request)
            self._owned = core.Owned(flags, specs, worker_module.path())
        try:
            state = await self._owned.until_ready()
        except BaseException:
            self._owned.release()
            raise
        if self._relay is None and self._relayed is not None:
            self._relay = relay_module.follow(self._owned, state, self._relayed)
        return self

    async def __aenter__(self) -> CUDAWorker:
        return await self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def finished(self) -> None:
        """Waits for their end; raises ClusterError if they ended unexpectedly."""
        assert self._owned is not None, "await it first"
        await self._until_ended(self._owned)
        if self._owned.failure is not None:
            raise self._owned.failure

    async def close(self, timeout: float = 5) -> None:
        """Ends the workers. They hand their data to other workers of the scheduler first."""
        if self._owned is not None:
            if self._relay is not None:
                self._relay.expect_end()
            self._owned.release()
            await self._until_ended(self._owned)

    async def _until_ended(self, owned: core.Owned) -> None:
        await owned.until_ended()
        if self._relay is not None:
            self._relay.stop()


_kept: list[int] = []
_certificates = contextlib.ExitStack()


def kept() -> list[int]:
    """Descriptors of the files that workers read from this Python."""
    return list(_kept)


def prepare(request: keywords.Request) -> tuple[dict[str, Any], list[Spec]]:
    """The flags and specs of a request. The files that its workers read stay open until this Python
    ends."""
    specs = list(request.specs)
    if request.worker:
        descriptor = worker_module.keep(request.worker)
        _kept.append(descriptor)
        specs.append({"worker": {"env": worker_module.variable(descriptor)}})
    return {**certificates.of_workers(request.security, _certificates), **request.flags}, specs
