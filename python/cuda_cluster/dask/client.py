"""Sets up a client's process as dask-cuda does: UCX, cuDF's spilling, serializers.

*Invariant:* a variable that the user set is not changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import dask

from cuda_cluster import _internals, program

logger = logging.getLogger("distributed.client")

#: Seconds until a client looks again whether it knows that its connection is lost.
LOOK_AGAIN = 0.05


def prepare() -> None:
    """Sets up what every client of GPU workers needs."""
    # RAPIDS libraries must not choose a GPU before CUDA_VISIBLE_DEVICES is settled.
    os.environ["RAPIDS_NO_INITIALIZE"] = "True"
    _register_serializers()


def configure_ucx(env: Mapping[str, str], *, context: bool) -> None:
    """Configures UCX in this process as in the workers, whose environment is `env`; with `context`,
    it creates a CUDA context."""
    wanted = {name: value for name, value in env.items() if name.startswith("UCX_")}
    theirs = program.environment()
    different = {name for name, value in wanted.items() if theirs.get(name, value) != value}
    program.set_for_clients(wanted)
    if _ucx_runs() and set(wanted) - _configured - different:
        warnings.warn(
            "UCX was initialised in this process before the cluster started, so its configuration "
            "is not the workers': start the cluster first, or set what `cuda-cluster env` prints",
            stacklevel=3,
        )
    _configured.update(wanted)
    if context:
        dask.config.set({"distributed-ucxx.create-cuda-context": True})


def follow(cluster: Any, address: str | None) -> None:
    """Has the clients of a cluster object move to a scheduler that listens elsewhere than the one
    that ended. Left alone, they try the old address only, and close."""
    for client in _internals.clients_of(cluster):
        client.loop.add_callback(_move, client, address)


async def _move(client: Any, address: str | None) -> None:
    while client.status == "running" and client.scheduler.address != address:
        await asyncio.sleep(LOOK_AGAIN)
    if client.status != "connecting":
        return
    try:
        await _internals.connect_again(client, address)
    except OSError as error:
        logger.error("Cannot connect to the scheduler at %s, closing client: %s", address, error)
        await _internals.give_up(client)


_configured: set[str] = set()


def _ucx_runs() -> bool:
    import sys

    module = sys.modules.get("distributed_ucxx.ucxx")
    return getattr(module, "ucxx", None) is not None


def enable_spilling(level: int, *, simulated: bool) -> None:
    """Enables cuDF's spilling in this process, too."""
    try:
        import cudf
    except ImportError:
        if simulated:
            return
        raise
    cudf.set_option("spill", True)
    cudf.set_option("spill_stats", level)


def initialize(
    create_cuda_context: bool = True,
    enable_tcp_over_ucx: bool | None = None,
    enable_infiniband: bool | None = None,
    enable_nvlink: bool | None = None,
    enable_rdmacm: bool | None = None,
) -> None:
    """`dask_cuda.initialize.initialize`: configures UCX for a client of a cluster that another
    program started. `eval "$(cuda-cluster env NAME)"` is exact."""
    asked = (enable_tcp_over_ucx, enable_infiniband, enable_nvlink)
    usual = True if False in asked and True not in asked else None
    tcp, infiniband, nvlink = (usual if one is None else one for one in asked)
    config: dict[str, Any] = {
        "distributed-ucxx.tcp": tcp,
        "distributed-ucxx.infiniband": infiniband,
        "distributed-ucxx.nvlink": nvlink,
        "distributed-ucxx.rdmacm": enable_rdmacm,
        "distributed-ucxx.cuda-copy": True if tcp or infiniband or nvlink else None,
        "distributed-ucxx.create-cuda-context": create_cuda_context,
    }
    dask.config.set(config)


def _register_serializers() -> None:
    """Registers dask-cuda's serializers of cuDF's frames, unless cuDF spills itself."""
    _internals.register_lazily(("cudf", "dask_cudf"), _spill_aware)


def _spill_aware() -> None:
    try:
        import cudf
    except ImportError:
        return
    if not cudf.get_option("spill"):
        from cudf.comm import serialize  # noqa: F401
