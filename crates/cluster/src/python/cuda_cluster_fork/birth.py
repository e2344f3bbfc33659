"""Makes a forked process what the shim makes of an executed one, in the same order.

Parent-death signal, control group, limits, CPUs, memory policy, read-back, environment,
descriptors; only then does anything of the process's own begin. The instructions are
the shim's (`os::shim::Instructions` in Rust).

*Invariant:* what is reported as in force was read from the kernel, never assumed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from cuda_cluster_fork.failure import StartFailure

if TYPE_CHECKING:
    from cuda_cluster_fork.pipe import Pipe

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_PREFERRED_MANY = 0, 1, 2, 5  # linux/mempolicy.h
NODES = 1024

# (set_mempolicy, get_mempolicy), which the C library does not wrap.
SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}

libc = ctypes.CDLL(None, use_errno=True)


class Binding(TypedDict):
    cpus: str | None
    mems: str | None
    memory_policy: str


class Connection(TypedDict):
    socket: str
    greeting: str


class _Program(TypedDict):
    argv: list[str]
    env: dict[str, str]
    binding: Binding


class Program(_Program, total=False):
    without: list[str]
    connections: dict[str, Connection]


class Both(TypedDict):
    """A soft and a hard limit; None for no limit."""

    soft: int | None
    hard: int | None


class Instructions(TypedDict):
    """What is read here of the shim's instructions."""

    program: Program
    limits: dict[str, int | None | Both]
    cgroup: str | None
    strict: bool


def die_with(parent: int) -> None:
    """Asks for SIGKILL when `parent`, this process's parent now or in a moment, has ended."""
    deadline = time.monotonic() + 5
    while os.getppid() != parent:
        # The process in between, which forked this one, is about to end.
        if time.monotonic() > deadline:
            os._exit(125)
        time.sleep(0.0005)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(125)


def become(instructions: Instructions, guardian: int, status: Pipe, outputs: list[int]) -> None:
    """Applies the instructions to this process, which has one thread, and tells what is in force."""
    cpus, mems, notes = _apply(instructions, guardian, outputs)
    status.bound(cpus, mems, notes)


def _apply(instructions: Instructions, guardian: int, outputs: list[int]) -> tuple[str, str, list[str]]:
    notes: list[str] = []
    group = instructions["cgroup"]
    if group is not None:
        try:
            with open(f"{group}/cgroup.procs", "w") as file:
                file.write("0")
        except OSError as error:
            notes.append(f"the control group {group} refused: {error.strerror}")
    _set_limits(instructions["limits"], notes)
    cpus, mems = _bind(instructions["program"]["binding"], notes)
    if instructions["strict"] and notes:
        raise StartFailure("under 'strict': " + "; ".join(notes))
    _set_environment(instructions, guardian)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((nothing, 0), (outputs[0], 1), (outputs[-1], 2)):
        os.dup2(source, target)
    for descriptor in (nothing, *outputs):
        os.close(descriptor)
    _connect(instructions["program"])
    return cpus, mems, notes


def _set_limits(limits: dict[str, int | None | Both], notes: list[str]) -> None:
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if kind is None:
            notes.append(f"limit {name} is not known here")
            continue
        try:
            resource.setrlimit(kind, _both(wanted, resource.getrlimit(kind)[1]))
        except (OSError, ValueError) as error:
            both = [wanted["soft"], wanted["hard"]] if isinstance(wanted, dict) else [wanted]
            shown = ":".join("unlimited" if one is None else str(one) for one in both)
            notes.append(f"limit {name} could not be set to {shown}: {error}")


def _both(wanted: int | None | Both, hard: int) -> tuple[int, int]:
    """A soft and a hard limit; the hard one is raised if only a higher soft one is wanted."""

    def number(limit: int | None) -> int:
        return resource.RLIM_INFINITY if limit is None else limit

    if isinstance(wanted, dict):
        return number(wanted["soft"]), number(wanted["hard"])
    if wanted is None or hard == resource.RLIM_INFINITY:
        return number(wanted), resource.RLIM_INFINITY
    return wanted, max(hard, wanted)


def _bind(binding: Binding, notes: list[str]) -> tuple[str, str]:
    """Sets CPUs and memory policy; returns both as read back, in the kernel's list syntax."""
    asked = binding["cpus"]
    if asked is not None:
        try:
            os.sched_setaffinity(0, parse(asked))
        except OSError as error:
            notes.append(f"CPUs {asked} could not be set: {error.strerror}")
    if binding["mems"] is not None and binding["memory_policy"] != "none":
        _set_memory(binding["memory_policy"], binding["mems"], notes)
    cpus = render(os.sched_getaffinity(0))
    if asked is not None and not notes and cpus != asked:
        notes.append(f"CPUs {asked} were asked for, {cpus} are in force")
    return cpus, render(_memory_nodes())


def _set_memory(policy: str, mems: str, notes: list[str]) -> None:
    nodes = parse(mems)
    code = _set_mempolicy(MPOL_BIND if policy == "bind" else MPOL_PREFERRED_MANY, nodes)
    if code != 0 and policy == "preferred":
        # Before Linux 5.15 only one node can be preferred.
        first = {min(nodes)}
        code = _set_mempolicy(MPOL_PREFERRED, first)
        if code == 0 and first != nodes:
            notes.append(f"of memory nodes {mems} only {min(nodes)} could be preferred")
    if code != 0:
        notes.append(f"memory nodes {mems} could not be set: {os.strerror(code)}")


def _set_mempolicy(mode: int, nodes: set[int]) -> int:
    """Returns the error number, 0 for none."""
    words = (ctypes.c_ulong * (NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    # One more than there are: the kernel takes one off, `set_mempolicy(2)` "BUGS".
    return _system_call(0, ctypes.c_int(mode), words, ctypes.c_ulong(NODES + 1))


def _memory_nodes() -> set[int]:
    """The nodes of the memory policy in force; none for the default policy."""
    mode, words = ctypes.c_int(MPOL_DEFAULT), (ctypes.c_ulong * (NODES // 64))()
    code = _system_call(1, ctypes.byref(mode), words, ctypes.c_ulong(NODES), None, ctypes.c_ulong(0))
    if code != 0 or mode.value == MPOL_DEFAULT:
        return set()
    return {node for node in range(NODES) if words[node // 64] >> (node % 64) & 1}


def _system_call(which: int, *arguments: Any) -> int:
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return 38  # ENOSYS
    failed = libc.syscall(ctypes.c_long(numbers[which]), *arguments)
    return ctypes.get_errno() if failed else 0


def _set_environment(instructions: Instructions, guardian: int) -> None:
    """The guardian's own variables, as an executed process inherits them, and the process's."""
    with open(f"/proc/{guardian}/environ", "rb") as file:
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    inherited = {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}
    for name in instructions["program"].get("without", ()):
        inherited.pop(name, None)
    os.environ.clear()
    os.environ.update({**inherited, **instructions["program"]["env"]})


def _connect(program: Program) -> None:
    """Connects what the program is to find open."""
    for variable, connection in program.get("connections", {}).items():
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(connection["socket"])
            stream.sendall(connection["greeting"].encode())
        except OSError as error:
            raise StartFailure(
                f"cannot connect {connection['socket']} for {variable}: {error.strerror}"
            ) from error
        stream.set_inheritable(True)
        os.environ[variable] = str(stream.detach())


def name(title: str) -> None:
    """The name that `ps` and `top` show for this process."""
    libc.prctl(PR_SET_NAME, title.encode()[:15])
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    # Fields 48 and 49 of proc(5), of which the first two are gone.
    start, end = int(fields[45]), int(fields[46])
    text = title.encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def parse(text: str) -> set[int]:
    """The numbers of a list like `0-3,8`."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers |= set(range(int(low), int(high or low) + 1))
    return numbers


def render(numbers: Iterable[int]) -> str:
    """The list of a set of numbers; `parse` backwards."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
