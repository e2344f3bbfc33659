"""Topologies of machines, and plans for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cuda_cluster import program
from cuda_cluster.model import Plan, Topology, read


def topology(source: str | os.PathLike[str] | None = None) -> Topology:
    """The topology of this machine, of a built-in one (`dgx-h100`), or of a file.

    Raises ClusterError.
    """
    arguments = ["topo"]
    if source is not None:
        arguments.append(f"--topology={os.fspath(source)}")
    return read(Topology, program.ask(arguments))


def plan(*, spec: str | os.PathLike[str] | Mapping[str, Any] | None = None, **flags: Any) -> Plan:
    """A plan. `flags` are those of `cuda-cluster plan`, with `_` for `-`; `spec` is a file, or a
    mapping with its content.

    Raises ClusterError.
    """
    arguments, stdin = ["plan"], None
    if isinstance(spec, Mapping):
        arguments, stdin = ["plan", "--file=-"], program.text_of(spec)
    elif spec is not None:
        arguments.append(f"--file={os.fspath(spec)}")
    return read(Plan, program.ask([*arguments, *program.flags(flags)], stdin=stdin))
