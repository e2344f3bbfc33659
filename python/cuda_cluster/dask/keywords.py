"""Translates Dask's and dask-cuda's keywords into flags of the program.

Keywords without a flag are passed to the worker, or are errors that say what to do instead. Those
without a meaning here are ignored (`silence_logs`: logs are files).

*Invariant:* every keyword of `dask_cuda.LocalCUDACluster` is known here.
"""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Nanny, Worker
from distributed.security import Security
from distributed.utils import parse_ports

from cuda_cluster.dask import worker as worker_module

#: Flags of `cuda-cluster up` that are keywords here under their own names.
FLAGS = (
    "topology simulate strict verify gpus workers_per_gpu cpu_workers busy_gpus display_gpus cpus "
    "scheduler_cores memory_policy net_devices exclude_nics control_device ucx_compat ucx_preset "
    "ucx ucx_version worker_port listen_address contact_address scheduler_file pid_file restart "
    "ready_within grace answer_within unresponsive dashboard_prefix death_timeout lifetime "
    "adapt_minimum start_workers start_method worker_names worker_name rmm_release_threshold rmm_log_directory"
).split()

#: Keywords whose effect depends on the number of planned workers: with them, `n_workers` is that.
SHARED_OUT = (
    "cpu_workers worker_port listen_address contact_address cpus scheduler_cores start_workers spec"
).split()

#: Keywords of `LocalCluster` that are refused, and why.
REFUSED = {
    "blocked_handlers": "the scheduler is a process of its own: set the Dask configuration "
    "'distributed.scheduler.blocked-handlers'",
    "scheduler_kwargs": "the scheduler is a process of its own: use the Dask configuration",
    "services": "the scheduler is a process of its own: use 'distributed.scheduler.http.routes'",
    "service_kwargs": "the scheduler is a process of its own: use the Dask configuration",
    "worker_services": "use the Dask configuration 'distributed.worker.http.routes'",
    "preload_nanny": "there are no nannies: the supervisor is one for all workers; 'preload' loads "
    "in the workers",
    "preload_nanny_argv": "there are no nannies: the supervisor is one for all workers",
}

#: Keywords without a meaning here, which are accepted.
WITHOUT_MEANING = {"silence_logs", "processes", "ip", "start", "nanny", "diagnostics_port"}


@dataclass
class Request:
    """What the program is asked to do."""

    flags: dict[str, Any]
    spec: dict[str, Any] = field(default_factory=dict)
    #: For the class of the workers: see `worker.py`.
    worker: dict[str, Any] = field(default_factory=dict)
    security: Security = field(default_factory=Security)
    protocol: str = "tcp"


def limit(value: Any, usual: str | None = None) -> Any:
    """A memory limit of dask-cuda's in the program's form."""
    if value in (None, 0, "0") or (usual is not None and value == "auto"):
        return "none"
    return "auto" if value == "default" else _text(value)


def _text(value: Any) -> Any:
    # "2 GB", as people write sizes.
    return value.replace(" ", "") if isinstance(value, str) else value


def devices(value: Any) -> str | None:
    """`CUDA_VISIBLE_DEVICES`, a text or a list, in the program's form."""
    if value is None:
        return None
    if isinstance(value, (str, int)):
        value = str(value).split(",")
    known = [one.strip() if isinstance(one, str) else str(int(one)) for one in value]
    return ",".join(one for one in known if one)


def names(value: Any, what: str) -> list[str] | None:
    """A list of names, given as a text with commas or a list."""
    if value is None:
        return None
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple, set)):
        raise ValueError(
            f"{what} must be either a comma-separated string or a list of strings. "
            "Examples: 'torch,cupy' or ['torch', 'cupy']"
        )
    return [one.strip() for one in value]


def usual_protocol() -> str:
    """`native` where it is: `scripts/bench-comm.sh` compares it with `tcp`."""
    try:
        import cuda_cluster.comm  # noqa: F401
    except ImportError:
        return "tcp"
    return "native"


def check_protocol(protocol: str | None, *options: bool | None) -> str | None:
    """The protocol that dask-cuda chooses; raises TypeError as it does."""
    if any(options):
        protocol = protocol or "ucx"
        if protocol not in ("ucx", "ucxx", "native"):
            raise TypeError("Enabling InfiniBand or NVLink requires protocol='ucx'")
    return protocol and protocol.removesuffix("://")


def rmm(keywords: dict[str, Any]) -> dict[str, Any]:
    """Removes RMM's keywords from `keywords`; returns them as flags."""
    pool, asynchronous = keywords.get("rmm_pool_size"), keywords.get("rmm_async", False)
    managed = keywords.get("rmm_managed_memory", False)
    if asynchronous and pool is not None:
        warnings.warn(
            "'rmm_pool_size' is not needed when 'rmm_async' is enabled and will raise an exception "
            "in the future. Remove the 'rmm_pool_size' argument when creating this cluster to "
            "silence this warning.",
            FutureWarning,
            stacklevel=4,
        )
    if pool is None and not managed and not asynchronous and keywords.get("enable_nvlink"):
        warnings.warn(
            "with NVLink, a pool for RMM ('rmm_pool_size') makes transfers faster", stacklevel=4
        )
    sizes = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")
    flags = {name: _text(keywords.pop(name, None)) for name in sizes}
    for name in ("rmm_managed_memory", "rmm_async", "rmm_track_allocations"):
        flags[name] = keywords.pop(name, None) or None
    flags["rmm_log_directory"] = keywords.pop("rmm_log_directory", None)
    flags["set_rmm_allocator_for_libs"] = names(
        keywords.pop("rmm_allocator_external_lib_list", None), "rmm_allocator_external_lib_list"
    )
    return flags


def translate(keywords: dict[str, Any]) -> Request:
    """Translates keywords of `LocalCUDACluster` into a request; empties `keywords`.

    Raises ValueError and TypeError as dask-cuda does, and for keywords that are refused here.
    """
    threads = keywords.pop("threads_per_worker", 1)
    if threads is None:
        threads = 1
    if threads < 1:
        raise ValueError("threads_per_worker must be higher than 0.")
    n_workers = keywords.pop("n_workers", None)
    if n_workers is not None and n_workers < 1:
        raise ValueError("Number of workers cannot be less than 1.")
    if keywords.pop("processes", None) is False:
        raise ValueError("Processes are necessary in order to use multiple GPUs with Dask")
    ucx = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
    security = _security(keywords.pop("security", None))
    host = keywords.pop("host", None)
    protocol = keywords.pop("protocol", None)
    if protocol is None and host and "://" in host:
        protocol = host.partition("://")[0]
    protocol = check_protocol(protocol, *(keywords.get(name) for name in ucx))
    if protocol is None and security.require_encryption:
        protocol = "tls"
    if protocol is None:
        # On a network, anybody's clients are expected.
        protocol = "tcp" if host or keywords.get("interface") else usual_protocol()

    flags: dict[str, Any] = {
        "engine": "dask",
        "name": keywords.pop("name", None),
        "n_workers": n_workers,
        "threads_per_worker": threads,
        "protocol": protocol,
        "host": host and host.partition("://")[2] or host,
        "interface": keywords.pop("interface", None),
        "scheduler_port": keywords.pop("scheduler_port", 0),
    }
    if n_workers is not None and not any(keywords.get(name) for name in SHARED_OUT):
        # The other GPUs' workers are planned, too, so that `scale` and `adapt` can start them.
        flags["n_workers"] = None
        keywords["start_workers"] = n_workers * (keywords.get("workers_per_gpu") or 1)
    visible = devices(keywords.pop("CUDA_VISIBLE_DEVICES", None))
    if visible is not None:
        flags["gpus"] = visible
    if "memory_limit" in keywords:
        flags["memory_limit"] = limit(keywords.pop("memory_limit"))
    if "device_memory_limit" in keywords:
        flags["device_memory_limit"] = limit(keywords.pop("device_memory_limit"), "auto")
    flags |= rmm(keywords)
    for name in (*ucx, "enable_rdmacm"):
        flags[name] = keywords.pop(name, None)
    if keywords.pop("enable_cudf_spill", False):
        flags["enable_cudf_spill"] = True
        flags["cudf_spill_stats"] = keywords.get("cudf_spill_stats")
    keywords.pop("cudf_spill_stats", None)
    dashboard = keywords.pop("dashboard_address", ":8787")
    flags |= {"dashboard": False} if dashboard is None else {"dashboard_address": dashboard}

    request = Request(flags, security=security, protocol=protocol)
    common(request, keywords)
    return request


def common(request: Request, keywords: dict[str, Any]) -> None:
    """Translates the keywords that clusters and single workers share; empties `keywords`."""
    flags = request.flags
    pre_import = names(keywords.pop("pre_import", None), "pre_import")
    flags["pre_import"] = [name for name in pre_import or () if name] or None
    flags["local_directory"] = keywords.pop("local_directory", None)
    flags["preload"] = names(keywords.pop("preload", None), "preload") or None
    for name in FLAGS:
        if keywords.get(name) is not None:
            flags[name] = keywords.pop(name)
    resources = keywords.pop("resources", None)
    if resources:
        flags["resources"] = resources
    env = {str(name): str(value) for name, value in (keywords.pop("env", None) or {}).items()}
    if env:
        request.spec["worker"] = {"env": env}
    config = flat(keywords.pop("config", None) or {})
    if config:
        request.spec["dask"] = {"config": config}
    spec = keywords.pop("spec", None)
    if spec is not None:
        request.spec = merged(load(spec), request.spec)

    log_spilling = keywords.pop("log_spilling", False)
    kind = keywords.pop("worker_class", None)
    if kind is not None and log_spilling is True:
        raise ValueError("Cannot enable `log_spilling` when `worker_class` is specified.")
    if log_spilling:
        kind = "dask_cuda.local_cuda_cluster.LoggedWorker"
    choose_class(request, kind)
    address = keywords.pop("worker_dashboard_address", None)
    if address is not None:
        request.worker |= {"dashboard_address": address, "dashboard": True}
    rest(request, keywords)
    if request.worker:
        flags["worker_class"] = worker_module.PATH


def choose_class(request: Request, kind: Any) -> None:
    """Sets the workers' class, given as a class or by its path. A nanny's class has no effect."""
    if isinstance(kind, str):
        request.flags["worker_class"] = kind
    elif kind is not None and issubclass(kind, Nanny):
        pass  # The supervisor is the nanny.
    elif kind is not None:
        request.worker["class"] = kind
    if request.worker and "worker_class" in request.flags:
        request.worker["class"] = request.flags.pop("worker_class")


def rest(request: Request, keywords: dict[str, Any]) -> None:
    """Passes the remaining keywords to the workers, or refuses them."""
    for name, why in REFUSED.items():
        if keywords.pop(name, None):
            raise ValueError(f"{name} is not supported: {why}")
    for name in WITHOUT_MEANING:
        keywords.pop(name, None)
    known = set(inspect.signature(Worker.__init__).parameters) - {"self", "kwargs", "name", "nthreads"}
    memory = {f"memory_{what}_fraction" for what in ("target", "spill", "pause")}
    for name in list(keywords):
        value = keywords.pop(name)
        if name in known | memory:
            if value is not None:
                request.worker[name] = value
            continue
        if name in FLAGS:
            continue  # None.
        near = difflib.get_close_matches(name, [*known, *FLAGS, *DASK_CUDA], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"LocalCUDACluster got an unexpected keyword {name!r}{hint}")
    if "class" not in request.worker and request.worker and "worker_class" in request.flags:
        request.worker["class"] = request.flags["worker_class"]


#: dask-cuda's own keywords.
DASK_CUDA = (
    "CUDA_VISIBLE_DEVICES n_workers threads_per_worker memory_limit device_memory_limit "
    "enable_cudf_spill cudf_spill_stats local_directory protocol enable_tcp_over_ucx "
    "enable_infiniband enable_nvlink enable_rdmacm rmm_pool_size rmm_maximum_pool_size "
    "rmm_managed_memory rmm_async rmm_allocator_external_lib_list rmm_release_threshold "
    "rmm_log_directory rmm_track_allocations log_spilling pre_import"
).split()


def _security(security: Any) -> Security:
    if security is None or security is False:
        return Security()
    if security is True:
        return Security.temporary()
    if not isinstance(security, Security):
        raise TypeError("security must be a Security object")
    return security


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A Dask configuration as key to text: `{"a": {"b": 1}}` is `{"a.b": "1"}`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        elif value is not None:
            found[key] = str(value)
    return found


def load(spec: Any) -> dict[str, Any]:
    """A spec that is given as a mapping, or as the path of a file."""
    if isinstance(spec, Mapping):
        return dict(spec)
    import yaml

    path = os.path.abspath(os.fspath(spec))
    with open(path) as file:
        read = yaml.safe_load(file) or {}
    if not isinstance(read, dict):
        raise ValueError(f"{path} is not a spec: it must contain a mapping")
    for name, value in (read.get("tls") or {}).items():
        # Relative paths are below the file's directory.
        read["tls"][name] = os.path.join(os.path.dirname(path), value)
    return read


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two specs in one; values of `above` win."""
    both = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(both.get(name), Mapping):
            value = merged(both[name], value)
        both[name] = value
    return both


def ports_for(worker_port: str, workers: int) -> None:
    """Raises ValueError, as dask-cuda does, when there are fewer ports than workers."""
    ports = parse_ports(worker_port)
    if len(ports) < workers:
        raise ValueError(
            f"Not enough ports in --worker-port range for {workers} GPUs. "
            f"Provide a range like {ports[0]}:{ports[0] + workers - 1}."
        )
