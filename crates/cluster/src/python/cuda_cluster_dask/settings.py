"""The settings of a process, as they come from Rust: `cluster::dask::settings`, and in it the plan's
(`plan::DaskPlan`), which has more than is read here. None is what was not asked for.

*Invariant:* what is here is passed, and what is passed is read; a test of the crate says so.
"""

from __future__ import annotations

from typing import TypedDict

#: A worker's name in Dask: the user's code may compare it with a GPU's index.
Name = int | str


class Tls(TypedDict):
    """Files of certificates."""

    ca_file: str
    cert: str
    key: str


class Plan(TypedDict):
    """What all processes are given alike."""

    protocol: str
    host: str | None
    interface: str | None
    tls: Tls | None
    scheduler_ports_required: bool
    dashboard: bool
    dashboard_address: str
    dashboard_prefix: str
    config: dict[str, str]
    pre_import: list[str]
    preload: list[str]
    listen_address: str | None
    contact_address: str | None
    local_directory: str | None
    death_timeout: str | None
    lifetime: str | None
    worker_class: str
    place_by_wires: bool
    place_by_kind: bool


class ForkServer(TypedDict):
    """The socket that it listens on, and what it imports."""

    socket: str
    imports: list[str]


class Settings(TypedDict):
    """Those of a scheduler and of a worker."""

    version: str
    plan: Plan
    config: dict[str, str]
    fork_server: ForkServer | None


class SchedulerSettings(Settings):
    """Files are named by their paths."""

    ports: tuple[int, int]
    ports_file: str
    scheduler_files: list[str]
    client_file: str
    client_env: dict[str, str]
    adapt: tuple[int, int] | None
    gb_per_s: dict[str, dict[str, float]]


class Rmm(TypedDict):
    """Memory pools on the worker's GPU."""

    pool_bytes: int | None
    maximum_pool_bytes: int | None
    release_threshold_bytes: int | None
    managed: bool
    asynchronous: bool
    log_directory: str | None
    track_allocations: bool
    set_allocator_for: list[str]


class Peer(TypedDict):
    """Another worker: its name in Dask, and that of its process."""

    name: Name
    process: str


class Way(TypedDict):
    """A way in words, and the lanes of which one must be there."""

    way: str
    lanes: list[str]


class Proof(TypedDict):
    """What a worker verifies before it is READY."""

    peers: list[Peer]
    expected: list[Way]


class WorkerSettings(Settings):
    """The scheduler is given by its address or by a file with it; limits are in bytes."""

    scheduler: str | None
    scheduler_file: str | None
    name: str
    dask_name: Name
    joins: bool
    named_by_host: bool
    threads: int
    port: int | None
    memory_limit: int | None
    resources: dict[str, float] | None
    device_memory_limit: int | None
    dashboard_address: str
    rmm: Rmm | None
    cudf_spill: int | None
    cuda_context: bool
    gpu_uuid: str | None
    verify: Proof | None
