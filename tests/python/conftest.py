"""A place of its own for these tests, and the check that nothing of a test is left in it."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "target" / "debug" / "cuda-cluster"

# Short, because socket paths are. Workers that run functions of these tests import this file, too.
RUNTIME = os.environ.get("XDG_RUNTIME_DIR", "")
if not RUNTIME.startswith("/tmp/ccp"):
    RUNTIME = tempfile.mkdtemp(prefix="ccp", dir="/tmp")

os.environ["XDG_RUNTIME_DIR"] = RUNTIME
os.environ["XDG_CACHE_HOME"] = str(ROOT / "target/cache")
# What tests name `python` or `dask` is that of the Python that runs them.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
# The wheel, where scripts/pythons.sh has installed it. Otherwise the source tree, as if it were installed;
# what is started here, notebooks and scripts, finds the same.
if "CUDA_CLUSTER_INSTALLED" not in os.environ:
    os.environ.setdefault("CUDA_CLUSTER_BIN", str(BUILT))
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    sys.path.insert(0, str(ROOT / "python"))
    runpy.run_path(str(ROOT / "scripts/source_tree.py"))

#: A machine that is not here; starts may take their time on a busy one.
MACHINE = {"topology": "dgx-a100", "simulate": True, "ready_within": "10m"}

#: Without a dashboard, for what is only started and ended.
QUIET = {**MACHINE, "dashboard_address": None}


def others():
    """Processes of this place, but for this one."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if int(entry) in (os.getpid(), os.getppid()):
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        ours = b"cuda-cluster" in command or b"cuda_cluster" in command or b"dask " in command
        if RUNTIME.encode() in environment and ours:
            found.append((int(entry), command.replace(b"\0", b" ").decode()[:80]))
    return found


def eventually(holds, what, within=60):
    """Waits until it holds; `what` is to hold, or says what is there when it does not."""
    deadline = time.monotonic() + within
    while not holds():
        late = time.monotonic() > deadline
        assert not late, f"not within {within} s: {what() if callable(what) else what}"
        time.sleep(0.02)


def files():
    """What clusters of this place have on disks and in shared memory."""
    found = {str(path) for path in Path(RUNTIME).glob("cuda-cluster/*")}
    python = re.compile(rf"cuda-cluster-{os.getuid()}-\w+-python-{os.getpid()}-")
    return found | {name for name in os.listdir("/dev/shm") if python.match(name)}


@pytest.fixture
def nothing_is_left():
    """For tests that take down what they brought up."""
    before, processes = files(), set(others())
    yield
    eventually(lambda: not set(others()) - processes, lambda: f"no process is left: {others()}")
    eventually(lambda: files() <= before, lambda: f"no file is left: {files() - before}")


@pytest.fixture
def made_up_machine():
    """Starts a command on a machine of so many made-up GPUs (`tests/fake-machine`)."""
    if not (BUILT.parent / "examples/fake-machine").exists():
        pytest.skip("cargo build --examples builds the made-up machine")
    return lambda gpus: [str(ROOT / "scripts/made-up.sh"), str(gpus)]


#: Of each node of the Slurm of these tests.
GPUS_OF_A_NODE = 8


@pytest.fixture(scope="module")
def slurm():
    import slurm

    missing = slurm.missing()
    if missing:
        pytest.skip(f"no {', '.join(missing)}: scripts/setup.sh --tests installs Slurm")
    with slurm.Slurm(GPUS_OF_A_NODE) as running:
        yield running


@pytest.fixture
def run_in_slurm(slurm, made_up_machine, tmp_path):
    """Runs a command on a machine with GPUs; returns its output, and its status if that is `asked`.
    Nothing of its jobs is left."""
    (tmp_path / "cuda-cluster").symlink_to(os.environ["CUDA_CLUSTER_BIN"])
    environment = {**slurm.environment, "PYTHON": sys.executable,
                   "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip

    def run(*command, asked=False, **more):
        command = [*made_up_machine(GPUS_OF_A_NODE), "env", "-C", str(tmp_path), *map(str, command)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400,
                              env={**environment, **more})  # fmt: skip
        said = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
        if asked:
            return done.returncode, done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr + said + slurm.logs()
        return done.stdout

    yield run
    eventually(lambda: not slurm.jobs(), "no job is left")
    eventually(lambda: not slurm.processes(), f"no process of a job is left: {slurm.processes()}")


def pytest_sessionfinish(session):
    shutil.rmtree(RUNTIME, ignore_errors=True)
