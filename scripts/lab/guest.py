"""What the suites share in the machine: the table, the program, and its clusters."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import traceback

import machine
from machine import ALL_CPUS, ALL_NODES, text

CGROUPS = pathlib.Path("/sys/fs/cgroup")
#: The flags with which each worker gets its NIC.
RDMA = ["--enable-infiniband", "--net-devices", "auto"]
#: Emulation is slow and sometimes stalls; nothing is judged by its duration.
LIMIT = 400


class Table:
    """Rows of passed, failed and not run, printed as they come."""

    def __init__(self):
        self.passed = self.failed = self.left = 0

    def check(self, what, expected, seen):
        """`seen` is a value, or what finds it; `expected` is a value, or what judges the other."""
        try:
            seen = seen() if callable(seen) else seen
            good = expected(seen) if callable(expected) else expected == seen
        except Exception as error:
            if not isinstance(error, (Wrong, subprocess.TimeoutExpired)):
                traceback.print_exc()
            good, seen = False, f"{type(error).__name__}: {error}"
        if callable(expected):
            expected = expected.__doc__
        self.passed += good
        self.failed += not good
        print(f"{'passed' if good else 'FAILED'}   {what}", flush=True)
        if good and show(expected) == show(seen):
            print(f"         as expected: {show(seen)}", flush=True)
        else:
            print(f"         expected: {show(expected)}\n         seen:     {show(seen)}", flush=True)
        return good

    def not_run(self, what, why):
        self.left += 1
        print(f"NOT RUN  {what}\n         {why}", flush=True)

    def run(self, parts, wanted=sys.argv[1:]):
        """Runs parts: all, or those that the command line names."""
        for part in parts:
            if not wanted or part.__name__ in wanted:
                try:
                    part()
                except Exception as error:
                    failed = error
                    self.check(f"{part.__name__}: to its end", "all of it", lambda: repr(failed))
        print(f"{self.passed} passed, {self.failed} failed, {self.left} not run", flush=True)


class Wrong(Exception):
    """A command has not done what the next check needs."""


def show(value):
    if isinstance(value, dict):
        return ", ".join(sorted(f"{show(key)} {show(each)}" for key, each in value.items()))
    if isinstance(value, (set, frozenset)):
        return machine.text(value) if all(isinstance(each, int) for each in value) else show(sorted(value))
    if isinstance(value, (list, tuple)):
        return " ".join(map(show, value)) or "-"
    said = str(value) or "-"
    # Both ends; what was judged is all of it.
    return said if len(said) < 3000 else f"{said[:400]} […] {said[-700:]}"


def containing(*parts):
    """Judges text by what must be in it."""

    def judge(seen):
        return all(part in str(seen) for part in parts)

    judge.__doc__ = " … ".join(parts)
    return judge


def eventually(look, holds, within=LIMIT):
    """What `look` returns once it holds, or at the end of patience."""
    deadline = time.monotonic() + within
    while True:
        seen = look()
        if holds(seen) or time.monotonic() > deadline:
            return seen
        time.sleep(0.5)


def sh(*command, within=LIMIT, **more):
    """A command's output; its failure is an exception with what it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=within, **more)
    if done.returncode != 0:
        raise Wrong(f"{' '.join(map(str, command))}: {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout


def sysfs(path):
    return pathlib.Path("/sys", path).read_text().strip()


#: Where the GPUs' description is; the program's own disk cannot be written to.
MADE_UP = pathlib.Path("/tmp/gpus")

#: The environment of the program: GPUs are made up, all else is the machine's.
ENVIRONMENT = {
    **os.environ,
    "CUDA_CLUSTER_NVML": "/lab/lib/libnvidia-ml.so.1",
    "CUDA_CLUSTER_FAKE_NVML": str(MADE_UP / "gpus.json"),
    "CUDA_CLUSTER_FAKE_FAULTS": "",
    "CUDA_CLUSTER_FAKE_CUDA_FAULTS": "",
    "LD_LIBRARY_PATH": "/lab/lib",
    "XDG_RUNTIME_DIR": "/run/lab",
    "NO_COLOR": "1",
}


class Said:
    """How a command of the program ended, and all that it said."""

    def __init__(self, done):
        self.code, self.out, self.text = done.returncode, done.stdout, done.stdout + done.stderr

    def json(self):
        return json.loads(self.out)

    def __str__(self):
        return f"exit {self.code}: {' '.join(self.text.split())}"


def program(*arguments, group=None, before=(), **env):
    """Runs the program, in a control group or after other words if they are given."""

    def enter():
        (group / "cgroup.procs").write_text("0")

    done = subprocess.run([*before, "/lab/cuda-cluster", *map(str, arguments)], capture_output=True,
                          text=True, timeout=LIMIT, env={**ENVIRONMENT, **env},
                          preexec_fn=enter if group else None)  # fmt: skip
    return Said(done)


def needs(said):
    if said.code != 0:
        raise Wrong(str(said))
    return said


def plan(*flags, **more):
    return needs(program("plan", *flags, "-o", "json", **more)).json()


def state(name="lab", **more):
    return needs(program("ps", name, "-o", "json", **more)).json()


def worker(name, cluster="lab", **more):
    return next(each for each in state(cluster, **more)["workers"] if each["name"] == name)


@contextlib.contextmanager
def up(*flags, name="lab", **more):
    """A cluster that is READY, as `up`'s words; it is taken down whatever happens."""
    try:
        yield needs(program("up", *flags, "--name", name, "--detach", "--ready-within", f"{LIMIT - 10}s",
                            **more))  # fmt: skip
    finally:
        # The group is for the cluster, and full when it is one of a test about memory.
        program("down", name, **{key: value for key, value in more.items() if key != "group"})


def lanes(state):
    """The kinds of lanes with their devices, of every pair."""
    return {(each["name"], peer["peer"]): sorted(peer["lanes"])
            for each in state["workers"] for peer in each["peers"]}  # fmt: skip


def threads(pid):
    """The CPUs that each thread may use."""
    status = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/status")]
    return {re.search(r"Cpus_allowed_list:\s*(\S+)", each)[1] for each in status}


def mappings(pid):
    """The memory policies of a process's mappings, and the nodes that its private pages are on."""
    policies, pages = set(), {}
    for line in pathlib.Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        policies.add(re.match(r"\S+ (prefer \(many\):\S+|\S+)", line)[1])
        if " file=" not in line:
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                pages[int(node)] = pages.get(int(node), 0) + int(count)
    return sorted(policies), pages


def word(policy, nodes):
    """How the kernel writes a policy."""
    return {"none": "default", "bind": f"bind:{text(nodes)}",
            "preferred": f"prefer (many):{text(nodes)}"}[policy]  # fmt: skip


def bound(pid):
    return [*sorted(threads(pid)), *mappings(pid)[0]]


def as_planned(gpu, cpus=ALL_CPUS, nodes=ALL_NODES):
    """What `bound` is with `--cpus local --memory-policy preferred`."""
    return [text(machine.cpus(gpu, cpus)), word("preferred", machine.memory(gpu, nodes))]


def processes():
    """Every process of the program, by what it executes."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.path.basename(os.readlink(path / "exe")).startswith("cuda-cluster"):
                found.add(int(path.name))
    return found


def prepare():
    """RDMA devices by Soft-RoCE on the NICs, in the order of the list, and control groups."""
    for module in ("virtio_net", "ib_uverbs", "rdma_ucm", "rdma_rxe", "dummy"):
        sh("modprobe", module)
    os.makedirs("/run/lab", mode=0o700, exist_ok=True)
    # Beside the description the made-up driver counts the memory of all users' processes.
    MADE_UP.mkdir(exist_ok=True)
    MADE_UP.chmod(0o1777)
    shutil.copy("/lab/gpus.json", MADE_UP)
    # The addresses are there at once.
    for which in ("all", "default"):
        pathlib.Path(f"/proc/sys/net/ipv6/conf/{which}/accept_dad").write_text("0")
    if pathlib.Path("/sys/class/infiniband/soft0").exists():
        return
    for nic in machine.NICS:
        here = pathlib.Path("/sys/bus/pci/devices", nic.place)
        [netdev] = eventually(lambda: list(here.glob("virtio*/net/*")), bool, 30)
        sh("ip", "link", "set", netdev.name, "name", cable(nic))
        sh("ip", "link", "set", cable(nic), "up")
        sh("rdma", "link", "add", machine.roce(nic), "type", "rxe", "netdev", cable(nic))
    # And one without hardware.
    sh("ip", "link", "add", "soft", "type", "dummy")
    sh("ip", "link", "set", "soft", "up")
    sh("rdma", "link", "add", "soft0", "type", "rxe", "netdev", "soft")
    (CGROUPS / "cgroup.subtree_control").write_text("+memory +cpuset +pids")


def cable(nic):
    return "cable" + nic.name[3:]
