"""Finds the program, and runs its commands.

*Invariant:* a keyword is the program's flag with `_` for `-`, and means the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cuda_cluster import _table, accepted
from cuda_cluster.errors import ClusterError, ProgramNotFound

#: The path of a spec file, or what would stand in one.
Spec: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
#: A spec, or several that are merged in their order.
Specs: TypeAlias = "Spec | Sequence[Spec] | None"

NAME = "cuda-cluster"
VARIABLE = "CUDA_CLUSTER_BIN"

#: Variables that this package has set in this process for clients of a cluster, and their values.
_for_clients: dict[str, str] = {}
#: Variables that this package has set for this process as a worker (`bind`), and their values.
_for_worker: dict[str, str] = {}


def program_path() -> str:
    """The program's path: what `CUDA_CLUSTER_BIN` names, else the one that was installed with this
    package, else the first on `PATH`.

    Raises ProgramNotFound if there is none.
    """
    asked = os.environ.get(VARIABLE)
    if asked:
        if os.access(asked, os.X_OK) and not os.path.isdir(asked):
            return os.path.abspath(asked)
        raise ProgramNotFound(f"{VARIABLE} names {asked}, which can't be executed")
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    if "posix_user" in sysconfig.get_scheme_names():
        folders.append(sysconfig.get_path("scripts", scheme="posix_user"))
    # Installed into a folder of its own (`pip install --target`).
    folders.append(str(Path(__file__).resolve().parent.parent / "bin"))
    for folder in folders:
        path = os.path.join(folder, NAME)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    found = shutil.which(NAME)
    if found is None:
        raise ProgramNotFound(
            f"there is no {NAME} program in {', '.join(dict.fromkeys(folders))}, nor on PATH",
            hint=f"pip install cuda-cluster, or name the program in {VARIABLE}",
        )
    return found


def environment() -> dict[str, str]:
    """The program's environment: this process's, without what was set here for a cluster's clients, or
    for this process as a worker."""
    return {
        name: value
        for name, value in os.environ.items()
        if value not in (_for_clients.get(name), _for_worker.get(name))
    }


def set_for_clients(wanted: Mapping[str, str]) -> None:
    """Sets variables of this process, unless somebody else has set them."""
    _set(_for_clients, wanted)


def set_for_worker(wanted: Mapping[str, str]) -> None:
    """Sets variables of this process as a worker, instead of those that were set for it before, unless
    somebody else has set them."""
    while _for_worker:
        name, value = _for_worker.popitem()
        if os.environ.get(name) == value:
            del os.environ[name]
    _set(_for_worker, wanted)


def _set(ours: dict[str, str], wanted: Mapping[str, str]) -> None:
    theirs = environment()
    for name, value in wanted.items():
        if name not in theirs:
            os.environ[name] = ours[name] = value


def version() -> str:
    """The program's version."""
    return run(["--version"]).split()[-1]


def flags(keywords: Mapping[str, Any]) -> list[str]:
    """Keywords as the program's flags; None leaves a flag out."""
    arguments: list[str] = []
    for keyword, value in keywords.items():
        if value is None:
            continue
        flag = "--" + keyword.replace("_", "-")
        if value is False:
            arguments += [_table.OFF[keyword]] if keyword in _table.OFF else []
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, Mapping):
            arguments.append(f"{flag}={' '.join(f'{name}={one}' for name, one in value.items())}")
        elif isinstance(value, (list, tuple, set, frozenset, range)):
            if _table.TAKES.get(keyword) == "files":
                arguments += [f"{flag}={one}" for one in value]
            else:
                arguments.append(f"{flag}={','.join(map(str, value))}")
        else:
            arguments.append(f"{flag}={value}")
        if "\0" in "".join(arguments):
            raise ValueError(f"{keyword} must not contain a NUL character: {value!r}")
    return arguments


def run(arguments: list[str], *, pass_fds: Sequence[int] = (), timeout: float | None = None) -> str:
    """Runs the program to its end; returns its standard output, or raises ClusterError."""
    try:
        said = subprocess.run(
            [program_path(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment(),
            pass_fds=pass_fds,
            timeout=timeout,
        )
    except OSError as error:
        raise ClusterError(f"cannot run {program_path()}: {error.strerror}") from error
    if said.returncode != 0:
        raise ClusterError.from_text(said.stderr, said.returncode)
    return said.stdout


def ask(arguments: list[str], *, pass_fds: Sequence[int] = ()) -> Any:
    """Runs a command with `-o json`; returns what it printed."""
    return json.loads(run([*arguments, "-o", "json"], pass_fds=pass_fds))


#: Characters that JSON may have in texts as they are, and YAML may not, or reads as ends of lines.
NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def _literal(value: Any, key: str = "spec") -> Any:
    """The value with texts that a spec file's reader takes as they are: it would put variables in.
    Raises ValueError for one that no such file can have."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} must be text, and {value!r} has bytes that are none") from None
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {name: _literal(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(inner, key) for inner in value]
    return value


class SpecFiles:
    """Specs as arguments of the program, to be merged in their order, and above them the keywords
    that are False and have no flag for that.

    A mapping becomes a file in memory, which only the program can read.
    """

    def __init__(self, specs: Specs, keywords: Mapping[str, Any]) -> None:
        switches = {name for name, takes in _table.TAKES.items() if takes == "switch"}
        off = {name: False for name in switches - _table.OFF.keys() if keywords.get(name) is False}
        #: To be passed to the program (`pass_fds`).
        self.descriptors: list[int] = []
        self.arguments: list[str] = []
        for spec in [*each(specs), *([off] if off else [])]:
            if isinstance(spec, Mapping):
                # YAML has no pairs of escapes for one character, and no other way for these.
                text = json.dumps({"version": 1, **_literal(spec)}, ensure_ascii=False)
                text = NOT_IN_YAML.sub(lambda one: f"\\u{ord(one[0]):04x}", text)
                self.descriptors.append(os.memfd_create("cuda-cluster-spec"))
                with open(self.descriptors[-1], "w", encoding="utf-8", closefd=False) as file:
                    file.write(text)
                spec = f"/proc/self/fd/{self.descriptors[-1]}"
            self.arguments.append(f"--file={os.fspath(spec)}")

    def __enter__(self) -> SpecFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def each(specs: Specs) -> list[Spec]:
    """What is one spec, several, or none, as a list."""
    if specs is None:
        return []
    taken: Any = accepted.SPEC.take("spec", specs)
    return list(taken) if isinstance(taken, list | tuple) else [taken]
