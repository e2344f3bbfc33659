"""Topologies of machines, and plans for them."""

from __future__ import annotations

import os
from typing import Any

from cuda_cluster import accepted, program
from cuda_cluster.model import Plan, Topology, read


def topology(source: str | os.PathLike[str] | None = None) -> Topology:
    """The topology of this machine, of a built-in one (`dgx-h100`), or of a file.

    Raises ClusterError.
    """
    arguments = ["topo"]
    if source is not None:
        arguments.append(f"--topology={accepted.PATH.take('source', source)}")
    return read(Topology, program.ask(arguments))


def plan(*, spec: program.Specs = None, **flags: Any) -> Plan:
    """A plan. `flags` are those of `cuda-cluster plan`, with `_` for `-`; `spec` is a file, a
    mapping with its content (in which `${…}` is only text), or a list of them that are merged in
    their order.

    Raises ClusterError.
    """
    flags = accepted.taken(flags)
    with program.SpecFiles(spec, flags) as files:
        arguments = ["plan", *files.arguments, *program.flags(flags)]
        return read(Plan, program.ask(arguments, pass_fds=files.descriptors))
