"""Translates Dask's and dask-cuda's keywords into flags of the program.

Keywords without a flag are passed to the worker, or are errors that say what to do instead. Those
without a meaning here are ignored.

*Invariant:* every keyword of `dask_cuda.LocalCUDACluster` is known here.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import dask
from distributed import Nanny, Security, Worker

from cuda_cluster import _settings, accepted, program
from cuda_cluster.cluster import made_up_name
from cuda_cluster._internals import parse_ports
from cuda_cluster.dask import net_devices
from cuda_cluster.dask import worker as worker_module

#: Keywords of the program that are none here, or mean more here than the program's flag.
NOT_ITS_OWN = set(
    "n_workers threads_per_worker nthreads cudf_spill_stats rmm_managed_memory rmm_async "
    "rmm_track_allocations enable_nvlink enable_infiniband enable_tcp_over_ucx enable_rdmacm "
    "dashboard enable_cudf_spill name engine host interface protocol worker_class join "
    "local_directory tls_ca_file tls_cert tls_key python rmm_pool_size rmm_maximum_pool_size "
    "memory_limit device_memory_limit scheduler_port dashboard_address "
    "set_rmm_allocator_for_libs pre_import preload resources spec".split()
)

#: Flags of `cuda-cluster up` that are keywords here under their own names.
FLAGS = [name for name in accepted.FLAGS if name not in NOT_ITS_OWN]

#: What takes a process long to import, and has nothing to do with GPUs. Who has loaded it will send graphs
#: with it: the scheduler imports it when it is READY, beside its work.
HEAVY = "numpy pandas dask.array dask.bag dask.dataframe scipy.sparse sklearn xgboost".split()

#: The largest number that the program reads.
LARGEST = 2**32 - 1

#: Keywords whose effect depends on the number of planned workers: with them, `n_workers` is that.
SHARED_OUT = ("cpu_workers worker_port listen_address contact_address cpus scheduler_cores spec").split()

#: Keys of a spec by which the program chooses a protocol.
SETTLE_PROTOCOL = set(
    "dask.protocol scheduler.host scheduler.interface tls.cert ucx.nvlink ucx.infiniband ucx.tcp "
    "ucx.rdmacm ucx.net_devices ucx.library ucx.compat".split()
)

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
WITHOUT_MEANING = {"processes", "start", "nanny", "diagnostics_port"}

#: What keywords take here; for the lists of modules see `names`.
ACCEPTED = {
    **{name: kind for name, kind in accepted.FLAGS.items() if name != "pre_import"},
    **dict.fromkeys(("processes", "log_spilling", "asynchronous", "relay"), accepted.SWITCH),
    **dict.fromkeys((f"memory_{what}_fraction" for what in ("target", "spill", "pause")), accepted.SHARE),
    "CUDA_VISIBLE_DEVICES": accepted.DEVICES,
    "ip": accepted.TEXT,
    "worker_class": accepted.CLASS,
    "dashboard_address": accepted.PORTS_OR_OFF,
    "worker_dashboard_address": accepted.PORTS,
    "env": accepted.ENVIRONMENT,
    "config": accepted.CONFIGURATION,
    "scheduler_sync_interval": _settings.SPAN,
}

#: Dask's configuration that is of one process alone: a client's, and its UCX's.
OF_ONE_PROCESS = set(
    "scheduler shuffle scheduler-address scheduler-file distributed-ucxx.create-cuda-context".split()
)


@dataclass
class Request:
    """What the program is asked to do."""

    flags: dict[str, Any]
    #: To be merged in this order; flags win over them.
    specs: list[program.Spec] = field(default_factory=list)
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
    # "2 GB" and 1e9, as people write sizes.
    if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE]\+?\d+", value.strip()):
        value = float(value)
    if isinstance(value, float) and value > 1 and value.is_integer():
        return int(value)
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
    if not (isinstance(value, (list, tuple, set)) and all(isinstance(one, str) for one in value)):
        raise ValueError(
            f"{what} must be either a comma-separated string or a list of strings. "
            "Examples: 'torch,cupy' or ['torch', 'cupy']"
        )
    return [accepted.TEXT.take(what, one.strip()) for one in value]


def usual_protocol() -> str:
    """`direct` where it is: `scripts/bench-comm.sh` compares it with `tcp`."""
    try:
        import cuda_cluster.comm  # noqa: F401
    except ImportError:
        return "tcp"
    return "direct"


def check_protocol(protocol: str | None, *options: bool | None) -> str | None:
    """The protocol that dask-cuda chooses; raises TypeError as it does."""
    if any(options):
        protocol = protocol or "ucx"
        if protocol not in ("ucx", "ucxx", "direct"):
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
        warnings.warn("with NVLink, a pool for RMM ('rmm_pool_size') makes transfers faster", stacklevel=4)
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
    chooses = net_devices.taken(keywords)
    keywords |= accepted.taken(keywords, ACCEPTED)
    threads = keywords.pop("threads_per_worker", 1)
    threads = 1 if threads is None else threads
    if threads < 1:
        raise ValueError("threads_per_worker must be higher than 0.")
    n_workers = keywords.pop("n_workers", None)
    if n_workers is not None and n_workers < 1:
        raise ValueError("Number of workers cannot be less than 1.")
    if keywords.pop("processes", None) is False:
        raise ValueError("Processes are necessary in order to use multiple GPUs with Dask")
    ucx = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
    spec = said(keywords.get("spec"))
    security = _security(keywords.pop("security", None))
    host = keywords.pop("host", None)
    ip = keywords.pop("ip", None)
    if ip is not None:
        warnings.warn("'ip' has become 'host'", DeprecationWarning, stacklevel=4)
        host = host or ip
    protocol = keywords.pop("protocol", None)
    if protocol is None and host and "://" in host:
        protocol = host.partition("://")[0]
    if protocol is not None or "dask.protocol" not in spec:
        protocol = check_protocol(protocol, *(keywords.get(name) for name in ucx))
    if protocol is None and security.require_encryption:
        protocol = "tls"
    if protocol is None and not SETTLE_PROTOCOL & spec.keys():
        # On a network, anybody's clients are expected.
        protocol = "tcp" if host or keywords.get("interface") else usual_protocol()

    flags: dict[str, Any] = {
        "engine": "dask",
        "python": None if "dask.python" in spec else sys.executable,
        "name": keywords.pop("name", None) or (None if "name" in spec else made_up_name()),
        "n_workers": n_workers,
        "threads_per_worker": unless_said(spec, "threads", threads, 1),
        "protocol": protocol,
        "host": host and host.partition("://")[2] or host,
        "interface": keywords.pop("interface", None),
        "scheduler_port": unless_said(spec, "scheduler.port", keywords.pop("scheduler_port", 0), 0),
    }
    started = (n_workers or 0) * (keywords.get("workers_per_gpu") or 1)
    # A number that the program can't read is refused by the name under which it was given.
    shared_out = keywords.get("start_workers") is not None or any(keywords.get(name) for name in SHARED_OUT)
    if 0 < started <= LARGEST and not shared_out:
        # The other GPUs' workers are planned, too, so that `scale` and `adapt` can start them.
        flags["n_workers"] = None
        keywords["start_workers"] = started
    visible = devices(keywords.pop("CUDA_VISIBLE_DEVICES", None))
    if visible is not None:
        if keywords.get("gpus") is not None:
            raise ValueError("'CUDA_VISIBLE_DEVICES' and 'gpus' are two names of one choice: give one")
        flags["gpus"] = visible
    memory = keywords.pop("memory_limit", "auto")
    device = keywords.pop("device_memory_limit", "default")
    if not (memory == "auto" and "memory.limit" in spec):
        flags["memory_limit"] = limit(memory)
    if not (device == "default" and "device.memory_limit" in spec):
        flags["device_memory_limit"] = limit(device, "auto")
    flags |= rmm(keywords)
    for name in (*ucx, "enable_rdmacm"):
        flags[name] = keywords.pop(name, None)
    if keywords.pop("enable_cudf_spill", False):
        flags["enable_cudf_spill"] = True
        flags["cudf_spill_stats"] = keywords.get("cudf_spill_stats")
    keywords.pop("cudf_spill_stats", None)
    dashboard = keywords.pop("dashboard_address", ":8787")
    own = {"scheduler.dashboard", "scheduler.dashboard_address"} & spec.keys()
    if keywords.pop("dashboard", None) is False or dashboard in (None, False):
        flags["dashboard"] = False
    elif not (dashboard == ":8787" and own):
        # Dask's users may give the port alone.
        flags["dashboard_address"] = f":{dashboard}" if isinstance(dashboard, int) else dashboard

    request = Request(flags, security=security, protocol=protocol or "")
    common(request, keywords)
    if _each_has_its_gpu(flags, spec):
        # As dask-cuda calls them; code compares the names with GPUs' numbers.
        flags.setdefault("worker_names", "gpu")
    if chooses is not None:
        net_devices.choose(request, chooses, spec)
    return request


def _each_has_its_gpu(flags: Mapping[str, Any], spec: Mapping[str, str]) -> bool:
    """Whether the workers can be called by their GPUs, and the spec does not say what to call them."""
    each = flags.get("workers_per_gpu") or spec.get("workers_per_gpu", 1)
    varying = flags.get("adapt_minimum") is not None or "dask.adapt_minimum" in spec
    return str(each) == "1" and not varying and not {"dask.worker_names", "dask.join"} & spec.keys()


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
    env = keywords.pop("env", None)
    config = flat(keywords.pop("config", None) or {})
    with dask.config.set({key: dask.config.interpret_value(value) for key, value in config.items()}):
        _settings.check()
        of_nannies = nanny_environment()
    if of_nannies:
        request.specs.append({"worker": {"env": of_nannies}})
    loaded = [name for name in HEAVY if name in sys.modules]
    if loaded:
        request.specs.append({"dask": {"config": {"cuda-cluster.imports": repr(loaded)}}})
    here = set_here()
    if here:
        request.specs.append({"dask": {"config": here}})
    request.specs += program.each(keywords.pop("spec", None))
    if env:
        request.specs.append({"worker": {"env": env}})
    if config:
        request.specs.append({"dask": {"config": config}})

    log_spilling = keywords.pop("log_spilling", False)
    kind = keywords.pop("worker_class", None)
    if kind is not None and log_spilling is True:
        raise ValueError("Cannot enable `log_spilling` when `worker_class` is specified.")
    if log_spilling:
        warnings.warn(
            "'log_spilling' has no effect: dask-cuda's storage of results has lost it", stacklevel=4
        )
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
        value = keywords.pop(name, None)
        if not (value is None or value is False or (isinstance(value, Sized) and len(value) == 0)):
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
        near = difflib.get_close_matches(name, {*known, *FLAGS, *DASK_CUDA} - {name}, 1, 0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"unexpected keyword {name!r}{hint}")
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


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """A Dask configuration as key to text: `{"a": {"b": 1}}` is `{"a.b": "1"}`."""
    values = _values(config).items()
    return {key: str(value) for key, value in values if value is not None and value != {}}


def set_here() -> dict[str, str]:
    """What this Python has set in Dask's configuration, as key to text: what is not of the files,
    variables and defaults that every process reads. A nanny would hand it on, too."""
    usual = _values(dask.config.merge(*dask.config.defaults, dask.config.collect()))
    found: dict[str, str] = {}
    for key, value in _values(dask.config.config).items():
        if key in OF_ONE_PROCESS or (key in usual and usual[key] == value):
            continue
        try:
            value = accepted.PLAIN.take(key, value)
        except (TypeError, ValueError) as error:
            warnings.warn(f"{error}: this setting does not reach the cluster's processes", stacklevel=4)
            continue
        # A text that reads as a number would become one.
        is_plain = isinstance(value, str) and dask.config.interpret_value(value) == value
        # Infinity has no other literal.
        text = value if is_plain else re.sub(r"(?<!['\w])inf\b", "1e999", repr(value))
        if dask.config.interpret_value(text) == value:
            found[key] = text
        else:
            text = f"{key}: {value!r} has no text, so this setting does not reach the cluster's processes"
            warnings.warn(text, stacklevel=4)
    return found


#: Where Dask's configuration has variables for workers, in the order in which a nanny sets them.
OF_NANNIES = ("distributed.nanny.pre-spawn-environ", "distributed.nanny.environ")


def nanny_environment() -> dict[str, Any]:
    """The variables that a nanny would give its worker, as far as they are not the usual ones, which
    the plan has. Variables of this process win over both, as with a nanny."""
    usual = dask.config.merge(*dask.config.defaults)
    found: dict[str, Any] = {}
    for key in OF_NANNIES:
        given = dask.config.get(key, None) or {}
        is_named = isinstance(given, Mapping)
        left_out = [name for name in given if given[name] is None] if is_named else []
        own = {name: given[name] for name in given if name not in left_out} if left_out else given
        own = accepted.ENVIRONMENT.take(key, own)
        known = dask.config.get(key, {}, config=usual)
        found |= {name: value for name, value in own.items() if str(known.get(name)) != value}
        for name in (name for name in left_out if name in known):
            text = f"{key}.{name} cannot be left out here; env={{{name!r}: …}} gives another value"
            warnings.warn(text, stacklevel=5)
    return {name: value for name, value in found.items() if name not in os.environ}


def _values(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        found |= _values(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found


def said(specs: program.Specs) -> dict[str, str]:
    """What specs say for themselves, as key to text like `flat`; nothing of a file that can't be read,
    which the program refuses with the reason. Variables are not put in."""
    import yaml

    found: dict[str, str] = {}
    for spec in program.each(specs):
        if not isinstance(spec, Mapping):
            if not os.path.isfile(spec):
                continue  # A pipe can be read once.
            try:
                with open(spec) as file:
                    spec = yaml.safe_load(file)
            except (OSError, ValueError, yaml.YAMLError):
                continue
        found |= flat(spec) if isinstance(spec, Mapping) else {}
    return found


def unless_said(spec: Mapping[str, str], key: str, value: Any, usual: Any) -> Any:
    """A keyword's value; None if it is the usual one, and the spec has a value of its own."""
    return None if value == usual and key in spec else value


def ports_for(worker_port: str, workers: int) -> None:
    """Raises ValueError, as dask-cuda does, when there are fewer ports than workers."""
    try:
        ports = parse_ports(worker_port)
    except ValueError:
        raise ValueError(
            f"worker_port must be a port or a range like 9000:9099, not {worker_port!r}"
        ) from None
    if len(ports) < workers:
        raise ValueError(
            f"Not enough ports in --worker-port range for {workers} GPUs. "
            f"Provide a range like {ports[0]}:{ports[0] + workers - 1}."
        )
