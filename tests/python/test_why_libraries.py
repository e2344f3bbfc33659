"""What `why` says of ranks that meet by MPI, and of Dask's workers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUILT
from test_why import STALLS, Job, python

pytestmark = pytest.mark.usefixtures("nothing_is_left")

#: MPI's ranks ask again and again whether a message has come, so they never sleep, and MPICH has a thread of its own.
OF_MPI = {
    "stopped": ("stopped", "stopped"),
    "sleeping": ("sleeps", "sleeping"),
    "own_lock": ("lock", "own_lock"),
    "lock_order": ("lock", "lock_order"),
    "pipe_without_reader": ("sleeps", "<module>"),
    "silent_server": ("outside", "silent_server"),
    "event_of_asyncio": ("idle", "event_of_asyncio"),
}

#: Programs in C: the standing, the cause, what is said of the odd rank and the function that it is in. Those that
#: ask MPI again and again run, so nothing says for how long.
NATIVE = {
    "own_lock": ("stalled", "lock", "waits for a lock", "own_lock"),
    "sleeping": ("stalled", "sleeps", "sleeps for another", "sleeping"),
    "other_collective": ("waiting", "collective", "is in MPI_Barrier", "other_collective"),
    "message": ("waiting", "peer", "is in MPI_Recv", "message"),
    "endless": ("waiting", "works", "works", "endless"),
}

#: Tasks of Dask, and whether they make a cluster stalled.
OF_DASK = {
    "own_lock": ("stalled", "lock", "own_lock"),
    "sleeps": ("stalled", "sleeps", "sleeps"),
    "queue_without_writer": ("stalled", "lock", "queue_without_writer"),
    "silent_server": ("stalled", "outside", "silent_server"),
    "computes": ("working", "works", "computes"),
}


@pytest.fixture
def over_mpi(tmp_path, monkeypatch):
    pytest.importorskip("mpi4py", reason="scripts/setup.sh --tests installs mpi4py and MPICH")
    monkeypatch.setenv("STALLS_OVER", "mpi")
    jobs = []

    def start(name, program):
        jobs.append(Job(f"mpi-{name}", python(program, name), tmp_path))
        return jobs[-1]

    yield start
    for one in jobs:
        one.end()


@pytest.mark.parametrize("cause", OF_MPI)
def test_the_rank_that_mpi_waits_for_is_named(over_mpi, cause):
    kind, function = OF_MPI[cause]
    code, verdict = over_mpi(cause, "causes.py").until(["stalled"], kind)
    assert (code, verdict["standing"], verdict.get("cause")) == (5, "stalled", kind), verdict
    assert verdict["odd"] == ["gpu2"], verdict
    assert verdict["groups"][0]["condition"]["place"].split(" in ")[1].split(".")[-1] == function


def test_ranks_that_ask_again_and_again_are_not_stalled_but_the_odd_one_is_named(over_mpi):
    job = over_mpi("other_collective", "causes.py")
    code, verdict = job.until(["waiting"], "collective")
    assert code == 0 and verdict["odd"] == ["gpu2"], verdict
    assert "they wait in different operations" in verdict["text"]


@pytest.mark.parametrize("program", ["computes", "one_is_slow"])
def test_slow_jobs_of_mpi_are_not_stalled(over_mpi, program):
    job = over_mpi(program, "healthy.py")
    job.until(("working", "waiting"))
    for _ in range(8):
        code, verdict = job.verdict()
        assert code == 0 and verdict["standing"] in ("working", "waiting"), verdict


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    mpicc = Path(sys.executable).with_name("mpicc")
    if not mpicc.exists():
        pytest.skip("scripts/setup.sh --tests installs MPICH")
    program = tmp_path_factory.mktemp("native") / "native"
    subprocess.run([mpicc, "-O2", "-o", program, STALLS / "native.c"], check=True)
    return program


@pytest.mark.parametrize("cause", NATIVE)
def test_ranks_in_c_are_named_with_their_functions(native, tmp_path, cause):
    standing, kind, text, function = NATIVE[cause]
    job = Job(f"c-{cause}", [str(native), cause], tmp_path)

    def told():
        code, verdict = job.verdict()
        odd = [one["condition"] for one in verdict["groups"] if one["ranks"] == ["gpu2"]]
        found = odd[0] if odd else {"text": "", "place": ""}
        is_so = text in found["text"] and found.get("place") == f"native in {function}"
        return (code, verdict["standing"], verdict.get("cause"), verdict["odd"], is_so), verdict

    try:
        job.until(["stalled", "waiting", "working"])
        expected = (5 if standing == "stalled" else 0, standing, kind, ["gpu2"], True)
        end = time.monotonic() + 90
        while (last := told())[0] != expected and time.monotonic() < end:
            time.sleep(0.5)
        assert last[0] == expected, last
    finally:
        job.end()


class Dask:
    """A cluster of four workers, and its client's programs."""

    def __init__(self, *more):
        self.name = f"why-dask-{os.getpid()}"
        place = ["--simulate", "--topology", "dgx-h100", "-o", "json", "--name", self.name]
        engine = ["--engine", "dask", "--python", sys.executable, "--n-workers", "4"]
        free_port = ["--scheduler-port", "0", "--no-dashboard"]
        self.up = subprocess.Popen(
            [str(BUILT), "up", *place, *engine, *free_port, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while "ready_after_ms" not in (line := self.up.stdout.readline()):
            assert line, "it is not READY"
        state = json.loads(subprocess.check_output([str(BUILT), "ps", self.name, "-o", "json"]))
        self.address = state["scheduler"]["address"]

    def verdict(self):
        said = subprocess.run([str(BUILT), "why", self.name, "-o", "json"], capture_output=True, text=True)
        return said.returncode, json.loads(said.stdout)["verdict"]

    def runs(self, program):
        command = [sys.executable, str(STALLS / "dask_causes.py"), self.address, program]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self):
        self.up.send_signal(signal.SIGINT)
        self.up.communicate(timeout=60)


@pytest.fixture
def dask(nothing_is_left):
    cluster = Dask()
    yield cluster
    cluster.end()


def test_the_task_that_does_not_go_on_is_named(dask):
    def told():
        verdict = dask.verdict()[1]
        condition = (verdict["groups"] or [{}])[0].get("condition", {})
        function = condition.get("place", " in ").split(" in ")[1]
        return verdict["odd"], (verdict["standing"], verdict.get("cause"), function)

    found = {}
    for cause, expected in OF_DASK.items():
        program = dask.runs(cause)
        end = time.monotonic() + 120
        while (last := told()) != (["gpu2"], expected) and time.monotonic() < end:
            time.sleep(0.5)
        found[cause] = last
        program.terminate()
        program.wait(30)
        subprocess.run([str(BUILT), "restart", dask.name, "gpu2"], check=True, capture_output=True)
    assert found == {cause: (["gpu2"], expected) for cause, expected in OF_DASK.items()}


def test_a_cluster_that_has_many_small_tasks_is_not_stalled(dask):
    program = dask.runs("many_small_tasks")
    try:
        time.sleep(5)
        for _ in range(8):
            code, verdict = dask.verdict()
            assert verdict["standing"] in ("working", "waiting", "idle", "cannot_tell"), verdict
            assert code in (0, 1)
    finally:
        program.terminate()
        program.wait(30)
