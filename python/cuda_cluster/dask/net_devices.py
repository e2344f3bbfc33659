"""NICs that a function chooses, GPU by GPU, as early versions of dask-cuda took them.

*Invariant:* the function is called once for each GPU that has workers, before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cuda_cluster import look
from cuda_cluster.model import Gpu, Nic

if TYPE_CHECKING:
    from cuda_cluster.dask.keywords import Request

#: The keyword, and its name in dask-cuda.
NAMES = ("net_devices", "ucx_net_devices")


class GpuOfWorker(int):
    """A GPU's index, which is a number to calculate with, and what is known of the GPU."""

    #: Name, UUID, PCI address, NUMA node, CPUs near it.
    gpu: Gpu
    #: All of the machine.
    nics: list[Nic]

    def __new__(cls, gpu: Gpu, nics: list[Nic]) -> GpuOfWorker:
        self = super().__new__(cls, gpu.index)
        self.gpu, self.nics = gpu, nics
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "gpu":  # Not set yet: in a copy, for instance.
            raise AttributeError(name)
        return getattr(self.gpu, name)


Chooses = Callable[[GpuOfWorker], Any]


def taken(keywords: dict[str, Any]) -> Chooses | None:
    """Removes the function from the keywords, if there is one; another value is the flag's."""
    given = [name for name in NAMES if keywords.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]!r} and {given[1]!r} are two names of one choice: give one")
    value = keywords.pop("ucx_net_devices", None)
    if value is not None:
        keywords["net_devices"] = value
    if callable(keywords.get("net_devices")):
        chooses: Chooses = keywords.pop("net_devices")
        return chooses
    return None


def choose(request: Request, chooses: Chooses, said: Mapping[str, str]) -> None:
    """Asks the function about the GPUs of the planned workers, and has its answers in the request."""
    if any(key.startswith("overrides") for key in said):
        raise ValueError(
            "a function for 'net_devices' and 'overrides' in a spec are two ways to one end: give one"
        )
    planned = look.plan(spec=request.specs, **request.flags)
    machine = look.topology(request.flags.get("topology"))
    wanted = {worker.gpu.index for worker in planned.workers if worker.gpu is not None}
    overrides = []
    for gpu in machine.gpus:
        if gpu.index not in wanted:
            continue
        answer = chooses(GpuOfWorker(gpu, machine.nics))
        devices = [answer] if isinstance(answer, str) else answer
        if devices is None:
            continue  # As without the function.
        if not isinstance(devices, (list, tuple)) or not all(isinstance(one, str) and one for one in devices):
            raise TypeError(
                f"the function for net_devices says {answer!r} of GPU {gpu.index}: neither names nor None"
            )
        names = [name for one in devices for name in one.split(",")]
        one_word = len(names) == 1 and names[0] in ("auto", "none", "pin", "stripe")
        overrides.append({"match": {"gpu": str(gpu.index)}, "net_devices": names[0] if one_word else names})
    if overrides:
        request.specs.append({"overrides": overrides})
