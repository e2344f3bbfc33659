#!/usr/bin/env python3
"""Which NUMA nodes vLLM and SGLang find for the GPUs of a process, beside `exec --gpu auto`.

    scripts/numa_rivals.py [MACHINE ...]

Runs their own functions, as they are installed in this Python, on made-up machines (`tests/fake-machine`)
of the built-in ones, under shuffled masks of numbers and UUIDs and with MIG instances; prints who is
right, and ends with 1 if ours is wrong anywhere. Needs a debug build (`cargo build --examples --bins`)
and root: the machine's NUMA nodes are mounted over this one's, in a namespace of the script's own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "target" / "debug"
MACHINES = ["dgx-h100", "dgx-1-v100", "hgx-b200", "gb200-nvl72-tray", "gh200", "rtx-4090-8", "dgx-a100-mig"]


def vllm() -> list[Any]:
    """The node of each visible device."""
    import types

    try:
        import vllm._C_stable_libtorch  # noqa: F401
    except ImportError:
        # Compiled kernels, which these functions do not use.
        sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import NvmlCudaPlatform

    return NvmlCudaPlatform.get_all_device_numa_nodes() or []


def sglang() -> list[Any]:
    """The first node of each visible device, as it is taken."""
    import pynvml  # noqa: F401  # without it SGLang binds nothing, which is no wrong answer of its own

    from sglang.srt.utils.numa_utils import _query_numa_node_for_gpu
    from torch.cuda import _raw_device_count_nvml

    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(mask.split(",")) if mask else _raw_device_count_nvml()
    nodes = [_query_numa_node_for_gpu(device) for device in range(count)]
    return [found[0] if found else None for found in nodes]


THEIRS: dict[str, Callable[[], list[Any]]] = {"vLLM": vllm, "SGLang": sglang}


def child(which: str, cpus: int) -> None:
    """What a framework says, on standard output's last line."""
    os.cpu_count = lambda: cpus
    try:
        said: Any = THEIRS[which]()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(said))


class Machine:
    """A made-up machine, with its nodes where the kernel has them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        (folder / "lib").mkdir()
        made = subprocess.run([str(BUILT / "examples/fake-machine"), name, str(folder / "machine")],
                              check=True, capture_output=True, text=True)  # fmt: skip
        lines = (line.partition("=") for line in made.stdout.splitlines())
        self.env = {key: value for key, _, value in lines if key != "CUDA_CLUSTER_UCX"}
        (folder / "lib/libnvidia-ml.so.1").symlink_to(self.env["CUDA_CLUSTER_NVML"])
        self.env["LD_LIBRARY_PATH"] = f"{folder}/lib"
        self.topology = json.loads(self.program(["topo", "--topology", name, "-o", "json"]))
        self.gpus = self.topology["gpus"]
        planned = ["plan", "--topology", name, "--engine", "command", "-o", "json"]
        self.plan = json.loads(self.program(planned))

    def program(self, arguments: list[str], **variables: str) -> str:
        command = [str(BUILT / "cuda-cluster"), *arguments]
        said = subprocess.run(command, env={**os.environ, **self.env, **variables},
                              capture_output=True, text=True)  # fmt: skip
        return said.stdout if said.returncode == 0 else json.dumps({"error": said.stderr.strip()})

    def cpus(self) -> int:
        texts = [node["cpus"] for node in self.topology["numa"] if node.get("cpus")]
        return max(int(part.split("-")[-1]) for text in texts for part in text.split(",")) + 1

    def theirs(self, which: str, mask: str | None) -> Any:
        nodes = f"{self.env['CUDA_CLUSTER_SYSFS']}/devices/system/node"
        inside = [sys.executable, __file__, "--child", which, str(self.cpus())]
        command = ["unshare", "-m", "sh", "-c", f'mount --bind {nodes} /sys/devices/system/node && exec "$@"']
        variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        said = subprocess.run([*command, "sh", *inside], env={**os.environ, **self.env, **variables},
                              capture_output=True, text=True)  # fmt: skip
        lines = said.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else said.stderr.strip()[-200:]

    def ours(self, mask: str | None, device: int) -> Any:
        """The node near the GPU that `exec` takes; the node of the plan for that machine."""
        variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        command = ["exec", "--gpu", "auto", f"--rank={device}", "-o", "json"]
        said = json.loads(self.program(command, **variables))
        if "error" in said:
            return said["error"].splitlines()[0]
        return self.node(said["gpu"]["index"])

    def node(self, index: int) -> int:
        """The node with CPUs that is near a GPU."""
        workers = self.plan["workers"]
        found = [worker["cpus"] for worker in workers if worker["gpu"]["index"] == index]
        first = int(found[0].replace("-", ",").split(",")[0])
        return next(node["id"] for node in self.topology["numa"] if has(node.get("cpus") or "", first))

    def true_node(self, entry: str | int) -> int:
        """What the description says of the GPU that an entry of a mask names."""
        for gpu in self.gpus:
            names = [str(gpu["index"]), gpu["uuid"], *(one["uuid"] for one in gpu.get("mig") or [])]
            if str(entry) in names:
                return int(gpu["numa"])
        raise AssertionError(entry)


def has(text: str, cpu: int) -> bool:
    ranges = [part.split("-") for part in text.split(",") if part]
    return any(int(one[0]) <= cpu <= int(one[-1]) for one in ranges)


def masks(machine: Machine) -> dict[str, list[str | int]]:
    """Masks by what they are; a GPU in MIG mode can only be named by its instances."""
    order = random.Random(33)
    whole = [gpu for gpu in machine.gpus if not gpu.get("mig")]
    numbers, uuids = [gpu["index"] for gpu in whole], [gpu["uuid"] for gpu in whole]
    order.shuffle(numbers)
    order.shuffle(uuids)
    instances = [one["uuid"] for gpu in machine.gpus for one in gpu.get("mig") or []]
    found: dict[str, list[str | int]] = {}
    if not instances:
        found["none"] = [gpu["index"] for gpu in machine.gpus]
    if whole:
        found |= {"numbers": list(numbers), "UUIDs": list(uuids)}
    found |= {"MIG": [instances[-1]]} if instances else {}
    return found


def compare(name: str, scores: Counter[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="ccp", dir="/tmp") as folder:
        machine = Machine(name, Path(folder))
        for kind, entries in masks(machine).items():
            mask = None if kind == "none" else ",".join(map(str, entries))
            right = [machine.true_node(entry) for entry in entries]
            said: dict[str, Any] = {which: machine.theirs(which, mask) for which in THEIRS}
            said["ours"] = [machine.ours(mask, at) for at in range(len(entries))]
            for which, nodes in said.items():
                verdict = "right" if nodes == right else "wrong"
                scores[which, verdict] += 1
                says = "" if verdict == "right" else f": says {nodes}, and it is {right}"
                print(f"{name}, mask of {kind}, {which} is {verdict}{says}", flush=True)


def main() -> int:
    scores: Counter[tuple[str, str]] = Counter()
    for name in sys.argv[1:] or MACHINES:
        compare(name, scores)
    for which in ["ours", *THEIRS]:
        print(f"{which}: {scores[which, 'right']} masks right, {scores[which, 'wrong']} wrong")
    return 1 if scores["ours", "wrong"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
