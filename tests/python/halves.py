"""A made-up machine on this one's kernel: eight GPUs, four near each half of its CPUs, each half with a NIC."""

import json
import os
import re
import subprocess
from pathlib import Path

import cuda_cluster
import pytest
from conftest import BUILT
from cuda_cluster.binding import _text_of as text

#: GPUs near each half.
NEAR = 4


def uuid(gpu):
    return f"GPU-00000000-0000-4000-8000-00000000000{gpu}"


def half(gpu):
    """The CPUs near a GPU, as the kernel writes them."""
    cpus = sorted(os.sched_getaffinity(0))
    middle = len(cpus) // 2
    return text(cpus[:middle] if gpu < NEAR else cpus[middle:])


def nic(gpu):
    return f"mlx5_{gpu // NEAR}:1"


def description(change=lambda gpus: gpus):
    """The machine; `change` takes its GPUs."""
    here = cuda_cluster.topology().json
    numa = here["numa"][0]
    bridges, gpus, nics = [{"id": "pci0000:00", "kind": "host", "numa": numa["id"], "package": 0}], [], []
    for side in range(2):
        down = lambda port: f"0000:{side}2:{port:02x}.0"
        bridges += [
            {"id": f"0000:00:0{side + 1}.0", "parent": "pci0000:00", "kind": "root_port"},
            {"id": f"0000:{side}1:00.0", "parent": f"0000:00:0{side + 1}.0", "kind": "switch_up"},
            *({"id": down(port), "parent": f"0000:{side}1:00.0", "kind": "switch_down"} for port in range(5)),
        ]
        gpus += [
            {"index": gpu, "uuid": uuid(gpu), "name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 40 << 30,
             "numa": numa["id"], "cpus": half(gpu), "compute_capability": "8.0", "mig": [],
             "pci": f"0000:{side}{3 + gpu % NEAR}:00.0", "parent": down(gpu % NEAR)}
            for gpu in range(side * NEAR, side * NEAR + NEAR)
        ]  # fmt: skip
        port = {"port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate_gbps": 200}
        nics.append({"name": f"mlx5_{side}", "pci": f"0000:{side}9:00.0", "parent": down(4),
                     "numa": numa["id"], "ports": [port]})  # fmt: skip
    here |= {"name": "made up", "notes": [], "numa": [numa]}
    return {**here, "gpus": change(gpus), "nics": nics, "bridges": bridges}


def made(folder, change=lambda gpus: gpus):
    """The environment in which this machine is that one."""
    if not (BUILT.parent / "examples/fake-machine").exists():
        pytest.skip("cargo build --examples builds the made-up machine")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two CPUs are needed to tell GPUs apart")
    (folder / "machine.json").write_text(json.dumps(description(change)))
    command = [BUILT.parent / "examples/fake-machine", folder / "machine.json", folder / "machine"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    # Each process may use what the kernel says.
    status = folder / "machine/proc/self/status"
    status.unlink()
    status.symlink_to("/proc/self/status")
    lines = (line.partition("=") for line in said.stdout.splitlines())
    return {name: value for name, _, value in lines if name != "CUDA_CLUSTER_UCX"}


def cpus_of(pid):
    """The CPUs of all threads of a process, as the kernel says."""
    found = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found.add(re.search(r"Cpus_allowed_list:\s*(\S+)", status.read_text())[1])
    return found


def policy_of(pid):
    """The memory policy of a process's first thread, proc_pid_numa_maps(5)."""
    line = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()[0]
    return re.match(r"\w+ (prefer \(many\):\S+|\S+)", line)[1]
