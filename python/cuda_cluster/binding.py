"""Binds this process, which somebody else has started, as the worker of its GPU.

Decides nothing: the program plans (`cuda-cluster exec --gpu auto -o json`), this applies it and reads
it back.

*Invariant:* what a `Bound` says is in force has been read from the kernel.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuda_cluster import accepted, program
from cuda_cluster.errors import ClusterError, NotBound, ProgramNotFound
from cuda_cluster.model import ProcessGpu, read

# The kernel's `include/uapi/linux/mempolicy.h`.
_DEFAULT, _PREFERRED, _BIND, _PREFERRED_MANY = 0, 1, 2, 5
_POLICIES = {_PREFERRED: "preferred", _BIND: "bind", _PREFERRED_MANY: "preferred", _DEFAULT: "default"}
#: The kernel's flags in a policy's mode (`MPOL_MODE_FLAGS`), which `get_mempolicy` returns with it.
_MODE = 0x1FFF
#: Nodes that a mask has room for: as many as any kernel has (`CONFIG_NODES_SHIFT`).
_NODES = 1024
#: Numbers of `set_mempolicy` and `get_mempolicy`, which glibc does not wrap.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}

#: How often all threads are bound again, because others may have been born meanwhile.
_ROUNDS = 20

#: CUDA's error codes, from `cuda.h`.
_NOT_INITIALIZED = 3

#: Libraries of OpenMP, which read their variables when they are loaded.
_OPENMP = re.compile(r"/(lib(?:gomp|iomp5|omp)\b[^/]*\.so[^/]*)$")

_ours = threading.Lock()
#: The CPUs that this process had before it was bound for the first time.
_before: frozenset[int] | None = None


@dataclass(frozen=True)
class Bound:
    """What a process is bound to, as it is in force."""

    #: The worker of the plan that this process is, like `gpu3`.
    worker: str
    gpu: ProcessGpu | None
    #: CPUs of all threads, like `0-31,64-95`.
    cpus: str
    #: NUMA nodes of the calling thread's memory policy; empty for the default policy.
    mems: str
    #: `preferred`, `bind` or `default`: the policy of the calling thread, and of threads that it starts.
    memory_policy: str
    #: How many threads there were, which are all bound to the CPUs. Those that were there before and
    #: are not the calling one keep their memory policy, which the kernel lets nobody else change.
    threads: int
    #: NIC ports for its traffic, nearest first.
    nics: list[str] = field(default_factory=list)
    #: Variables that were set.
    env: dict[str, str] = field(default_factory=dict)
    #: Variables that somebody else had set to something else, and that stay.
    kept: dict[str, str] = field(default_factory=dict)
    #: What is missing or assumed, one sentence each.
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Asked:
    """What the program says that is to be done."""

    worker: str
    env: dict[str, str]
    strict: bool
    gpu: ProcessGpu | None = None
    cpus: str | None = None
    mems: str | None = None
    memory_policy: str = "none"
    nics: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def bind(
    gpu: str | int = "auto",
    *,
    device: int | None = None,
    spec: program.Specs = None,
    **flags: Any,
) -> Bound:
    """Binds this process as the worker of its GPU: all of its threads to the CPUs near the GPU, the
    memory of this thread and of those that it will start to the nodes near it; and sets the variables
    of UCX, NCCL and CUDA that the plan has for it and that nobody has set.

    For the first line of a worker that somebody else's pool has started, before it uses CUDA. `gpu`
    is a number among all GPUs of the machine, a UUID, or `auto`: the one in `CUDA_VISIBLE_DEVICES`,
    of several the one of the launcher's local rank, or the machine's only one. `device` instead is
    CUDA's number of it in this process. `spec` and `flags` are those of `cuda-cluster exec`.

    A process that gets another GPU can be bound again. Memory that it has already stays where it is;
    `cuda-cluster exec` binds before the first instruction.

    Raises NotBound, and then nothing has changed: if CUDA has begun in this process, if there is no
    GPU for it, if the kernel does not do what was asked; under `strict` also if it refuses the memory
    policy, which is a note otherwise.
    """
    arguments = [f"--gpu={gpu}", *([] if device is None else [f"--rank={device}"])]
    if device is not None and gpu != "auto":
        raise NotBound(f"gpu={gpu!r} and device={device} are two names of one choice")
    with _ours:
        cuda = _cuda()
        if cuda == "context":
            raise NotBound(
                "CUDA has begun in this process: its memory and threads are already placed",
                hint="call bind() before anything uses a GPU, or start the process by `cuda-cluster exec`",
            )
        before = _threads()
        policy = _policy()
        try:
            _as_before()
            asked = _ask(arguments, spec, flags)
            _not_too_late(asked, cuda)
            return _apply(asked)
        except BaseException:
            _restore(before, policy)
            raise


def _ask(arguments: list[str], spec: program.Specs, flags: Mapping[str, Any]) -> _Asked:
    flags = accepted.taken(flags)
    with program.SpecFiles(spec, flags) as files:
        command = ["exec", *arguments, *files.arguments, *program.flags(flags)]
        try:
            return read(_Asked, program.ask(command, pass_fds=files.descriptors))
        except ProgramNotFound:
            raise
        except ClusterError as error:
            hint = error.hint and _of_keywords(error.hint)
            raise NotBound(
                error.message, causes=error.causes, hint=hint, exit_code=error.exit_code
            ) from error


def _of_keywords(hint: str) -> str:
    """The program's hint for who has called `bind`."""
    hint = hint.replace("cuda-cluster exec --gpu 3", "bind(gpu=3)")
    return hint.replace("give --rank N", "bind(device=N)")


def _not_too_late(asked: _Asked, cuda: str | None) -> None:
    """Refuses to set what CUDA has already read."""
    visible = "CUDA_VISIBLE_DEVICES"
    if cuda and visible in asked.env and visible not in program.environment():
        raise NotBound(
            f"CUDA has been initialised in this process, so {visible} can't be set any more",
            hint=f"call bind() before, or set {visible} where the process is started",
        )


def _apply(asked: _Asked) -> Bound:
    notes = list(asked.notes)
    if asked.mems is not None and asked.memory_policy != "none":
        refused = _set_policy(asked.memory_policy, numbers(asked.mems))
        if refused and asked.strict:
            raise NotBound(f"under strict: {refused}")
        notes += [refused] if refused else []
    if asked.cpus is not None:
        _set_cpus(numbers(asked.cpus))
    in_force = _threads()
    cpus = frozenset[int]().union(*in_force.values())
    if asked.cpus is not None and any(mask != numbers(asked.cpus) for mask in in_force.values()):
        raise NotBound(f"CPUs {asked.cpus} were asked for, {_text_of(cpus)} are in force")
    mode, nodes = _policy()
    theirs = program.environment()
    kept = {name: theirs[name] for name, value in asked.env.items() if theirs.get(name, value) != value}
    env = {name: value for name, value in asked.env.items() if name not in theirs}
    if loaded := "OMP_NUM_THREADS" in env and _mapped(_OPENMP):
        notes.append(f"OMP_NUM_THREADS comes too late for {loaded}, which has been loaded")
    program.set_for_worker(env)
    for note in notes[len(asked.notes) :]:
        warnings.warn(note, stacklevel=3)
    return Bound(
        worker=asked.worker,
        gpu=asked.gpu,
        cpus=_text_of(cpus),
        mems=_text_of(nodes),
        memory_policy=_POLICIES.get(mode, str(mode)),
        threads=len(in_force),
        nics=asked.nics,
        env=env,
        kept=kept,
        notes=notes,
    )


def _as_before() -> None:
    """Gives this thread the CPUs that it had before it was bound, for the program to plan with."""
    global _before
    if _before is None:
        _before = frozenset(os.sched_getaffinity(0))
    elif _before != os.sched_getaffinity(0):
        os.sched_setaffinity(0, _before)


def _set_cpus(cpus: Collection[int]) -> None:
    """Binds all threads, also those that others start meanwhile: they have their starter's CPUs."""
    for _ in range(_ROUNDS):
        others = [thread for thread, mask in _threads().items() if mask != cpus]
        if not others:
            return
        for thread in others:
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                pass  # It has ended.
            except OSError as error:
                message = f"CPUs {_text_of(cpus)} could not be set: {error.strerror}"
                raise NotBound(message) from error


def _threads() -> dict[int, frozenset[int]]:
    """This process's threads, and the CPUs of each."""
    found: dict[int, frozenset[int]] = {}
    try:
        for thread in map(int, os.listdir("/proc/self/task")):
            try:
                found[thread] = frozenset(os.sched_getaffinity(thread))
            except ProcessLookupError:
                pass
    except OSError as error:
        raise NotBound(f"this process's threads can't be read: {error}") from error
    return found


def _restore(before: Mapping[int, frozenset[int]], policy: tuple[int, frozenset[int]]) -> None:
    for thread in _threads():
        try:
            os.sched_setaffinity(thread, before.get(thread, before[threading.get_native_id()]))
        except OSError:
            pass  # It has ended, or may not have them any more.
    _call(0, policy[0], policy[1])


def _call(which: int, mode: int, nodes: Collection[int]) -> int:
    """`set_mempolicy`; returns its error number."""
    mask = (ctypes.c_ulong * (_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    # One bit more than the mask has, because the kernel subtracts one, set_mempolicy(2).
    bits = ctypes.c_ulong(_NODES + 1 if nodes else 0)
    number = ctypes.c_long(_numbers()[which])
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(number, ctypes.c_long(mode), mask if nodes else None, bits)
    return ctypes.get_errno() if failed else 0


def _numbers() -> tuple[int, int]:
    try:
        return _CALLS[platform.machine()]
    except KeyError:
        raise NotBound(f"the numbers of system calls of {platform.machine()} are not known") from None


def _set_policy(policy: str, nodes: frozenset[int]) -> str | None:
    """Sets this thread's memory policy, as `cuda-cluster exec` does; returns why it is not so."""
    if policy == "bind":
        error = _call(0, _BIND, nodes)
    else:
        error = _call(0, _PREFERRED_MANY, nodes)
        if error:
            # Before Linux 5.15 only one node can be preferred.
            error = _call(0, _PREFERRED, {min(nodes)})
            if not error and len(nodes) > 1:
                return f"of memory nodes {_text_of(nodes)} only {min(nodes)} could be preferred"
    return f"memory nodes {_text_of(nodes)} could not be set: {os.strerror(error)}" if error else None


def _policy() -> tuple[int, frozenset[int]]:
    """This thread's memory policy and its nodes."""
    mode = ctypes.c_int(_DEFAULT)
    mask = (ctypes.c_ulong * (_NODES // 64))()
    number, bits = ctypes.c_long(_numbers()[1]), ctypes.c_ulong(_NODES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, ctypes.byref(mode), mask, bits, None, ctypes.c_ulong(0)):
        # A kernel or a sandbox without NUMA has the default policy alone.
        return _DEFAULT, frozenset()
    nodes = (node for node in range(_NODES) if mask[node // 64] >> node % 64 & 1)
    plain = mode.value & _MODE
    return plain, frozenset() if plain == _DEFAULT else frozenset(nodes)


def _cuda() -> str | None:
    """How far CUDA has come in this process: `initialised`, or `context`."""
    try:
        # Found by its name, which it has wherever it was loaded from.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED:
        return None
    for device in range(count.value):
        state = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if state == 0 and active.value:
            return "context"
    current = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value:
        return "context"
    return "initialised"


def _mapped(library: re.Pattern[str]) -> str | None:
    """The first file in this process's memory that a pattern finds."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = (library.search(line.rstrip("\n").removesuffix(" (deleted)")) for line in maps)
        return next((one[1] for one in found if one), None)


def numbers(text: str) -> frozenset[int]:
    """Numbers from the kernel's list format: `0-3,8`."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(
        number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)
    )


def _text_of(some: Collection[int]) -> str:
    """Numbers in the kernel's list format."""
    parts: list[list[int]] = []
    for number in sorted(some):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
