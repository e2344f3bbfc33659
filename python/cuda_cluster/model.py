"""The program's JSON as objects, with the same names, for the keys that programs may rely on.

`json` has everything that was printed.

*Invariant:* unknown keys are ignored, so that the output of a newer program can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: type[T], value: Mapping[str, Any]) -> T:
    """Converts JSON into a `kind`; raises ValueError that names a missing key."""
    known: dict[str, Any] = {}
    for name, hint in _fields(typing.cast(Any, kind)).items():
        if name == "json":
            known[name] = dict(value)
        elif name in value:
            known[name] = _convert(hint, value[name])
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} cannot be read: {error}") from error


@functools.cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind)}


def _convert(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return [_convert(item, one) for one in value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value)
    return value


def _hidden() -> Any:
    """A field with everything that was printed."""
    return field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Gpu:
    """A GPU of a machine."""

    index: int
    name: str
    uuid: str | None = None
    pci: str | None = None
    #: NUMA node.
    numa: int | None = None
    #: CPUs near it, like `0-31,64-95`.
    cpus: str | None = None
    memory_bytes: int | None = None
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class NicPort:
    """A port of a NIC."""

    port: int
    state: str | None = None
    link_layer: str | None = None
    rate_gbps: float | None = None
    netdev: str | None = None


@dataclass(frozen=True)
class Nic:
    """A NIC with RDMA."""

    name: str
    pci: str | None = None
    numa: int | None = None
    ports: list[NicPort] = field(default_factory=list)
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node."""

    id: int
    cpus: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Link:
    """How two devices reach each other: `NV18`, `PIX`, `SYS`, as `nvidia-smi topo -m` has it."""

    a: str
    b: str
    kind: str


@dataclass(frozen=True)
class Topology:
    """A machine."""

    gpus: list[Gpu]
    nics: list[Nic] = field(default_factory=list)
    numa: list[NumaNode] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    #: What could not be read, and what was assumed instead.
    notes: list[Any] = field(default_factory=list)
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class ProcessGpu:
    """The GPU of a process."""

    index: int
    uuid: str | None = None
    pci: str | None = None


@dataclass(frozen=True)
class Rejected:
    """A rejected candidate, with the reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Why:
    """A choice with its reason."""

    choice: str
    chosen: str
    reason: str
    rejected: list[Rejected] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedWorker:
    """A worker of a plan."""

    name: str
    rank: int | None = None
    #: Which of several programs it runs; None if there is one, or for a spare.
    program: str | None = None
    gpu: ProcessGpu | None = None
    cpus: str | None = None
    mems: str | None = None
    nics: list[str] = field(default_factory=list)
    threads: int | None = None
    memory_limit_bytes: int | None = None
    device_memory_limit_bytes: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    why: list[Why] = field(default_factory=list)
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class Plan:
    """The processes to run, their bindings, and the reasons."""

    name: str
    #: The engine's settings: an object with one key, the engine's name.
    engine: dict[str, Any]
    workers: list[PlannedWorker]
    notes: list[Any] = field(default_factory=list)
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class Process:
    """A process of a running cluster."""

    name: str
    state: str
    pid: int | None = None
    #: Which of several programs it runs; None if there is one, or for a spare.
    program: str | None = None
    #: The other machine whose workers it brings up, as it was named; only of `ClusterState.hosts`.
    host: str | None = None
    address: str | None = None
    dashboard: str | None = None
    restarts: int = 0
    gpu: ProcessGpu | None = None
    #: CPUs in force, as read back.
    cpus: str | None = None
    mems: str | None = None
    #: The limit of its memory that holds here; the plan's may be for another machine.
    memory_limit_bytes: int | None = None
    resident_bytes: int | None = None
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class JoinedWorker:
    """A worker of another supervisor, or of none, that has joined a Dask cluster's scheduler."""

    #: For the scheduler.
    name: str
    #: `ready`, `left` or `lost`.
    state: str
    #: RFC 3339.
    since: str
    address: str
    #: The name of its machine, or its address.
    host: str
    #: Its cluster there, and its name in that; None if cuda-cluster has not started it.
    cluster: str | None = None
    process: str | None = None
    gpu: int | None = None
    cpus: str | None = None
    nics: list[str] = field(default_factory=list)
    #: Why it has gone.
    reason: str | None = None
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class ClusterState:
    """A cluster, as it is."""

    name: str
    engine: str
    #: `starting`, `verifying`, `ready`, `recovering`, `unresponsive`, `degraded`, `stopping`,
    #: `stopped`, `failed`.
    state: str
    run_directory: str
    simulated: bool = False
    supervisor_pid: int | None = None
    scheduler: Process | None = None
    workers: list[Process] = field(default_factory=list)
    #: The processes that each bring up the workers of another machine (`hosts=`).
    hosts: list[Process] = field(default_factory=list)
    #: Those of other machines; also the last ones that have gone.
    joined: list[JoinedWorker] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    json: dict[str, Any] = _hidden()


@dataclass(frozen=True)
class Event:
    """Something that happened to a cluster."""

    #: When, RFC 3339.
    at: str
    #: What: `ready`, `exited`, `restarting`, … Its details are in `json`.
    event: str
    #: To which process; None for the cluster.
    process: str | None = None
    json: dict[str, Any] = _hidden()
