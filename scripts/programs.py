#!/usr/bin/env python3
"""Programs under `cuda-cluster run`, beside each one's own launcher, and the table of what was seen.

    scripts/programs.py [FRAMEWORK ...]              [default: those that are installed]
    scripts/programs.py --slurm [FRAMEWORK ...]      under `srun`, with `exec` and without

torch, lightning, deepspeed, jax, xgboost, mpi (MPICH's mpi4py), openmpi (its mpi4py), ray, rrun; under a Slurm
that the script starts: jax, mpi, torch.

The ranks run in the Python that runs this script, on a made-up machine of four GPUs, two near each half
of this one's CPUs. Needs a debug build (`cargo build --examples --bins`), and two CPUs. Ends with 1 if
ours does worse than the other anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "target" / "debug"
RANKS = 4
#: An environment entry of all processes that a trial has started, to find those that are left.
MARK = "PROGRAMS_TRIAL"

#: What each rank does: says what it is bound to at its first line, meets the others, says who it is.
#: Then it ends, or waits, or, as rank 1, fails.
BEGIN = """
    import os, sys, time
    cpus = sorted(os.sched_getaffinity(0))
    mode, folder = sys.argv[-2:]
    def said(rank, size, total, cpus=cpus):
        path = f"{folder}/{os.getpid()}"
        with open(path + ".part", "w") as file:
            print(rank, size, total, ",".join(map(str, cpus)), file=file)
        os.rename(path + ".part", path)
        # All have met before one fails.
        while mode != "end" and sum(not it.endswith("part") for it in os.listdir(folder)) < size:
            time.sleep(0.02)
        if mode == "fail" and rank == 1:
            os._exit(7)
        if mode != "end":
            time.sleep(600)
"""

MPI = """
    from mpi4py import MPI
    ranks = MPI.COMM_WORLD
    said(ranks.Get_rank(), ranks.Get_size(), ranks.allreduce(1))
"""

#: Not ranks, but actors of one program, each on a GPU. They are bound by their constructors, or born bound
#: in a runtime environment; beside each, the same of Ray alone.
RAY = """
    import cuda_cluster, cuda_cluster.ray, ray
    which = sys.argv[1]
    class Actor:
        def __init__(self):
            if which == "bind":
                cuda_cluster.bind()
        def place(self):
            return sorted(os.sched_getaffinity(0))
        def meet(self, *who):
            said(*who)
    resources = cuda_cluster.ray.resources() if which == "born" else {}
    ray.init(num_gpus=4, num_cpus=4, resources=resources, include_dashboard=False,
             object_store_memory=80 << 20, log_to_driver=False)
    options = cuda_cluster.ray.options() if which == "born" else [{"num_gpus": 1} for _ in range(4)]
    if which == "environment":
        options = [one | {"runtime_env": {"env_vars": {"NAMED": "1"}}} for one in options]
    actors = [ray.remote(Actor).options(num_cpus=0, **one).remote() for one in options]
    places = ray.get([actor.place.remote() for actor in actors])
    ray.get([actor.meet.remote(rank, len(actors), len(places), cpus)
             for rank, (actor, cpus) in enumerate(zip(actors, places))])
"""

MEETING = {
    "torch": """
        import torch.distributed as ranks, torch
        ranks.init_process_group("gloo")
        total = torch.ones(1)
        ranks.all_reduce(total)
        said(ranks.get_rank(), ranks.get_world_size(), int(total))
    """,
    "lightning": """
        import lightning, torch
        fabric = lightning.Fabric(accelerator="cpu", devices=4, strategy="ddp")
        fabric.launch()
        total = fabric.all_reduce(torch.ones(1), reduce_op="sum")
        said(fabric.global_rank, fabric.world_size, int(total))
    """,
    "deepspeed": """
        import deepspeed, torch
        import torch.distributed as ranks
        deepspeed.init_distributed("gloo")
        total = torch.ones(1)
        ranks.all_reduce(total)
        said(ranks.get_rank(), ranks.get_world_size(), int(total))
    """,
    # Its ranks meet at a tracker, which one of them starts.
    "xgboost": """
        import numpy, xgboost.collective as ranks
        from xgboost.tracker import RabitTracker
        where, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"]
        if rank == "0":
            tracker = RabitTracker(int(os.environ["WORLD_SIZE"]), host_ip=where, port=port, sortby="task")
            tracker.start()
        with ranks.CommunicatorContext(dmlc_communicator="rabit", dmlc_tracker_uri=where,
                                       dmlc_tracker_port=port, dmlc_task_id=rank):
            total = ranks.allreduce(numpy.ones(1), ranks.Op.SUM)
            said(ranks.get_rank(), ranks.get_world_size(), int(total[0]))
    """,
    "jax": """
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize()
        from jax.experimental import multihost_utils
        total = len(multihost_utils.process_allgather(jax.numpy.ones(1)))
        said(jax.process_index(), jax.process_count(), total)
    """,
    "mpi": MPI,
    "openmpi": MPI,
    "rrun": """
        from rapidsmpf.bootstrap import create_ucxx_comm
        from rapidsmpf.progress_thread import ProgressThread
        ranks = create_ucxx_comm(ProgressThread())
        said(ranks.rank, ranks.nranks, ranks.nranks)
    """,
    "ray": RAY,
    "ray-environment": RAY,
}

#: How many processes of the framework itself stay when its program is killed, whoever started it: Ray's
#: agents for the dashboard and for runtime environments.
ITS_OWN = {"ray-environment": 2}


@dataclass
class Row:
    """What was seen of a framework under a launcher."""

    framework: str
    launcher: str
    peers: str = "no"
    ranks: str = "no"
    bound: str = "no"
    interrupted: str = "no"
    code: str = "no"
    orphans: str = "?"
    remarks: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        return [self.framework, self.launcher, self.peers, self.ranks, self.bound,
                self.interrupted, self.code, self.orphans]  # fmt: skip

    def lacks(self) -> list[str]:
        """What is not as it should be, whatever others do."""
        named = {"peers": self.peers, "ranks": self.ranks, "bound": self.bound}
        lacking = [name for name, seen in named.items() if seen != "yes"]
        lacking += ["Ctrl-C"] if self.interrupted.startswith("no") else []
        return lacking + (["orphans"] if int(self.orphans) > ITS_OWN.get(self.framework, 0) else [])

    def worse_than(self, other: Row) -> list[str]:
        """Where this does worse than another launcher."""
        pairs = zip(("peers", "ranks", "bound"), self.cells()[2:5], other.cells()[2:5])
        worse = [name for name, ours, theirs in pairs if ours == "no" and theirs == "yes"]
        worse += ["Ctrl-C"] if self.interrupted.startswith("no") > other.interrupted.startswith("no") else []
        worse += ["exit code"] if self.code != "7" and other.code == "7" else []
        return worse + (["orphans"] if int(self.orphans) > int(other.orphans) else [])


def marked(mark: str) -> list[int]:
    """The processes of a trial."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:
            continue
    return found


def until(holds: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Trial:
    """A program under a launcher, in a session of its own, as in a terminal."""

    def __init__(self, command: list[str], mode: str, env: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="ccpt", dir="/tmp"))
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*command, mode, str(self.folder)],
            env={**env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def lines(self) -> list[list[str]]:
        files = [path for path in self.folder.iterdir() if path.suffix != ".part"]
        return sorted(path.read_text().split() for path in files)

    def all_met(self, within: float = 240) -> bool:
        """Whether all ranks have met; false also if the launcher has ended without."""
        ended = lambda: self.process.poll() is not None
        until(lambda: len(self.lines()) == RANKS or ended(), within)
        return len(self.lines()) == RANKS

    def end(self, within: float) -> int | None:
        """The launcher's exit code; None if it does not end."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            return None

    def left(self) -> int:
        """How many processes are left a while after the launcher."""
        until(lambda: not marked(self.mark), 10)
        return len(marked(self.mark))

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in marked(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def watched(framework: str, launcher: str, command: list[str], env: dict[str, str]) -> Row:
    """A row: a program that ends, one that is interrupted, one that fails, and one that loses its
    launcher."""
    row = Row(framework, launcher)
    with Trial(command, "end", env) as trial:
        code = trial.end(300)
        lines = trial.lines()
        numbers = [tuple(map(int, line[:3])) for line in lines]
        row.peers = "yes" if lines and all(total == RANKS for *_, total in numbers) else "no"
        row.ranks = "yes" if sorted(numbers) == [(rank, RANKS, RANKS) for rank in range(RANKS)] else "no"
        halves = [line[3] for line in lines]
        everything = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        row.bound = "yes" if len(set(halves)) == 2 and everything not in halves else "no"
        if code != 0:
            row.remarks.append(f"ended with {code}: {trial.said().strip().splitlines()[-1:]}")
    left = 0
    with Trial(command, "wait", env) as trial:
        if trial.all_met():
            begun = time.monotonic()
            os.killpg(trial.process.pid, signal.SIGINT)
            code = trial.end(40)
            row.interrupted = "no" if code is None else f"{code} after {time.monotonic() - begun:.1f} s"
            left = trial.left()
            row.interrupted += f", {left} left" if left else ""
    with Trial(command, "fail", env) as trial:
        if trial.all_met():
            code = trial.end(60)
            row.code = "none in 60 s" if code is None else str(code)
            left = max(left, trial.left())
    with Trial(command, "wait", env) as trial:
        if trial.all_met():
            os.kill(trial.process.pid, signal.SIGKILL)
            trial.process.wait()
            left = max(left, trial.left())
        else:
            row.remarks.append(f"did not meet: {trial.said().strip().splitlines()[-1:]}")
    row.orphans = str(left)
    return row


def launchers(framework: str, program: str) -> Iterator[tuple[str, list[str]]]:
    """Our launcher and the framework's own, each with the command that it is."""
    python = [sys.executable, program]
    if framework == "ray":
        yield "Ray, actors that call bind()", [*python, "bind"]
        yield "Ray alone", [*python, "alone"]
        return
    if framework == "ray-environment":
        yield "Ray, actors by cuda_cluster.ray", [*python, "born"]
        yield "Ray alone, with a runtime_env", [*python, "environment"]
        return
    language = ["--bootstrap", "pmix"] if framework == "openmpi" else []
    run = [str(BUILT / "cuda-cluster"), "run", "-n", str(RANKS), *language]
    yield " ".join(["cuda-cluster run", *language]), [*run, "--", *python]
    beside = Path(sys.executable).parent
    if framework == "torch":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        yield "torchrun", [*command, f"--nproc-per-node={RANKS}", program]
    elif framework == "mpi":
        yield "mpiexec (MPICH)", [str(beside / "mpiexec"), "-n", str(RANKS), *python]
    elif framework == "lightning":
        yield "Lightning alone", python
    elif framework == "deepspeed":
        yield (
            "deepspeed",
            [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS), program],
        )
    elif framework == "openmpi":
        command = [str(beside / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS)]
        yield "mpirun (Open MPI)", [*command, *python]
    elif framework == "rrun":
        # It comes with the C++ library, and is not on the path.
        library = importlib.util.find_spec("librapidsmpf")
        places = [*(library.submodule_search_locations or [])] if library else []
        path = os.pathsep.join([*(f"{place}/bin" for place in places), os.environ["PATH"]])
        yield "rrun", [shutil.which("rrun", path=path) or "rrun", "-n", str(RANKS), *python]


#: What of Slurm's speaks a framework's language, where `srun` offers several.
UNDER_SLURM = {"jax": [], "mpi": ["--mpi=pmi2"], "torch": []}


def under_slurm(framework: str, program: str) -> Iterator[tuple[str, list[str]]]:
    """`srun` that starts our `exec`, and `srun` that starts the program."""
    # A single Ctrl-C ends it, and one rank's failure all: what all other launchers do unasked.
    srun = ["srun", "--nodes=1", f"--ntasks={RANKS}", f"--gpus-per-node={RANKS}", "--quit-on-interrupt",
            "--kill-on-bad-exit=1", *UNDER_SLURM[framework]]  # fmt: skip
    python = [sys.executable, program]
    yield "srun … cuda-cluster exec", [*srun, str(BUILT / "cuda-cluster"), "exec", "--", *python]
    yield "srun (Slurm)", [*srun, *python]


def resolve_nodes() -> None:
    """Has the names of Slurm's nodes mean this machine, as a cluster's names mean its nodes: begins this
    program again with an `/etc/hosts` of its own."""
    sys.path.insert(0, str(ROOT / "tests/python"))
    from slurm import NODES as nodes

    with contextlib.suppress(socket.gaierror):
        for node in nodes:
            socket.getaddrinfo(node, None)
        return
    if os.geteuid() != 0:
        sys.exit(f"{', '.join(nodes)} are no names of this machine, and only root can give it some")
    with tempfile.NamedTemporaryFile("w", prefix="ccp", dir="/tmp", delete=False) as hosts:
        hosts.write(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(nodes)}\n")
    inside = 'mount --bind "$0" /etc/hosts; failed=$?; rm "$0"; [ $failed = 0 ] && exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", inside, hosts.name, sys.executable, *sys.argv])


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """What a command needs to find a Slurm that ends with this."""
    from slurm import Slurm, missing

    if lacking := missing():
        sys.exit(f"there is no {', '.join(lacking)}: apt-get install slurm-wlm munge")
    with Slurm(gpus=RANKS) as started:
        yield {"SLURM_CONF": started.environment["SLURM_CONF"]}


def machine(folder: Path) -> dict[str, str]:
    """The environment in which this machine has four made-up GPUs, two near each half of its CPUs."""
    said = subprocess.run(
        [str(BUILT / "cuda-cluster"), "topo", "-o", "json"], check=True, capture_output=True, text=True
    )
    here = json.loads(said.stdout)
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    halves = [",".join(map(str, part)) for part in (cpus[:half], cpus[half:])]
    numa = here["numa"][0]
    gpu = {"name": "NVIDIA A100-SXM4-40GB", "numa": numa["id"], "memory_bytes": 40 << 30,
           "compute_capability": "8.0", "mig": []}  # fmt: skip
    here |= {"name": "made up", "notes": [], "numa": [numa], "nics": []}
    here["gpus"] = [
        {**gpu, "index": at, "uuid": f"GPU-00000000-0000-4000-8000-{at:012}",
         "pci": f"0000:{at + 1:02x}:00.0", "cpus": halves[at * 2 // RANKS]}
        for at in range(RANKS)
    ]  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(here))
    made = subprocess.run(
        [str(BUILT / "examples/fake-machine"), str(folder / "machine.json"), str(folder / "machine")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    lines = (line.partition("=") for line in made.stdout.splitlines())
    env = {name: value for name, _, value in lines if name != "CUDA_CLUSTER_UCX"}
    ours = {"XDG_RUNTIME_DIR": str(folder), "CUDA_CLUSTER_BIN": str(BUILT / "cuda-cluster")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # There is no CUDA for it to find.
    theirs = {"DS_ACCELERATOR": "cpu"}
    return {**os.environ, **env, **ours, **theirs, "PATH": path, "PYTHONPATH": str(ROOT / "python")}


def installed(framework: str) -> bool:
    module = {"mpi": "mpi4py", "openmpi": "mpi4py", "rrun": "rapidsmpf", "ray-environment": "ray"}.get(
        framework, framework
    )
    has = importlib.util.find_spec(module) is not None
    # mpi4py is built for any of them.
    opens = shutil.which("ompi_info", path=str(Path(sys.executable).parent)) is not None
    return has and opens == (framework == "openmpi") if module == "mpi4py" else has


def shown(rows: list[Row]) -> str:
    head = ["framework", "launcher", "finds its peers", "rank and size right",
            "bound before its first line", "Ctrl-C", "exit code of a rank that fails (7)",
            "orphans"]  # fmt: skip
    table = [head, ["---"] * len(head), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK")
    parser.add_argument("--slurm", action="store_true")
    # What it has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parser.parse_args()
    known = UNDER_SLURM if arguments.slurm else MEETING
    asked = arguments.frameworks or [one for one in known if installed(one)]
    if unknown := set(asked) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if missing := [one for one in asked if not installed(one)]:
        parser.error(f"not installed in {sys.executable}: {', '.join(missing)}")
    if arguments.slurm:
        resolve_nodes()
    rows, worse = [], []
    with tempfile.TemporaryDirectory(prefix="ccp", dir="/tmp") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        env = machine(folder) | (stack.enter_context(slurm()) if arguments.slurm else {})
        started_by = under_slurm if arguments.slurm else launchers
        for framework in asked:
            program = folder / f"{framework}_ranks.py"
            program.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(MEETING[framework]))
            seen = [watched(framework, name, command, env)
                    for name, command in started_by(framework, str(program))]  # fmt: skip
            rows += seen
            worse += [f"{framework}: {it} than it should be" for it in seen[0].lacks()]
            for other in seen[1:]:
                worse += [f"{framework}: {it} than {other.launcher}" for it in seen[0].worse_than(other)]
    print(shown(rows))
    for row in rows:
        for remark in row.remarks:
            print(f"{row.framework} under {row.launcher}: {remark}", file=sys.stderr)
    for one in worse:
        print(f"worse in {one}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
