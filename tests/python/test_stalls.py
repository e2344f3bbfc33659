"""What `--stalled-after` says of jobs and clusters that can't go on, and what becomes of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUILT, RUNTIME

pytestmark = pytest.mark.usefixtures("nothing_is_left")

STALLS = Path(__file__).parent / "stalls"


def asked(*words):
    return subprocess.run([str(BUILT), *words], capture_output=True, text=True, timeout=60, check=False)


class Cluster:
    """A command that brings something up in the foreground."""

    def __init__(self, *words, folder, command=()):
        self.name = f"stalls-{os.getpid()}-{time.monotonic_ns()}"
        simulated = ["--simulate", "--topology", "dgx-h100", "--name", self.name]
        self.process = subprocess.Popen(
            [str(BUILT), words[0], *simulated, *words[1:], *command],
            env={**os.environ, "STALLS_FOLDER": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def state(self):
        said = asked("ps", self.name, "-o", "json")
        return json.loads(said.stdout) if said.returncode == 0 else {}

    def events(self):
        said = asked("events", self.name, "--json")
        assert said.returncode == 0, said.stderr
        return [json.loads(line) for line in said.stdout.splitlines()]

    def until(self, is_so, seconds=90):
        end = time.monotonic() + seconds
        while not (found := is_so()):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < end, (self.state(), self.events())
            time.sleep(0.2)
        return found

    def said(self, event):
        return self.until(lambda: [one for one in self.events() if one["event"] == event])

    def end(self):
        """How it ended, and what it wrote."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    clusters = []

    def start(*words, command=()):
        clusters.append(Cluster(*words, folder=tmp_path, command=command))
        return clusters[-1]

    yield start
    for one in clusters:
        if one.process.returncode is None:
            one.end()
        # That of one that has failed is kept.
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/{one.name}", ignore_errors=True)


def program(name, *arguments):
    return ["--", sys.executable, str(STALLS / name), *arguments]


def test_a_run_that_is_stalled_ends_with_a_code_of_its_own_and_keeps_what_was_seen(start):
    flags = ("run", "-n", "4", "--stalled-after", "6s", "--end-when-stalled")
    job = start(*flags, command=program("causes.py", "lock_order"))
    output, _ = job.process.communicate(timeout=120)
    assert job.process.returncode == 5, output
    assert "run: stalled: gpu2 waits for a lock" in output
    assert "run: the ranks were ended, because they were stalled" in output
    later = asked("why", job.name, "-o", "json")
    assert later.returncode == 5 and json.loads(later.stdout)["verdict"]["odd"] == ["gpu2"]
    report = json.loads(asked("report", job.name, "-f", "-").stdout)
    assert report["stall"] == json.loads(later.stdout)["evidence"]
    assert report["state"]["cause"]["stalled"] is True


def test_a_rank_that_is_stopped_is_told_of_and_the_job_goes_on_with_it(start):
    job = start("run", "-n", "4", "--stalled-after", "5s", command=program("healthy.py", "one_is_slow"))
    ready = job.until(lambda: job.state().get("state") == "ready" and job.state())
    pid = ready["workers"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    told = job.said("stalled")[0]
    assert told["processes"] == ["gpu1"] and "stopped" in told["text"], told
    assert any(note.startswith("stalled: gpu1") for note in job.state()["notes"])
    os.kill(pid, signal.SIGCONT)
    job.said("goes_on")
    assert not any(note.startswith("stalled") for note in job.state()["notes"])
    code, output = job.end()
    assert code == 130, output
    assert "run: stalled: gpu1" in output and "run: the ranks go on" in output


@pytest.mark.parametrize("name", ["sleeps_between_steps", "one_is_slow"])
def test_a_slow_job_is_left_alone(start, name):
    flags = ("run", "-n", "4", "--stalled-after", "5s", "--end-when-stalled")
    job = start(*flags, command=program("healthy.py", name))
    job.until(lambda: job.state().get("state") == "ready")
    time.sleep(15)
    assert job.process.poll() is None, job.process.stdout.read()
    assert not [one for one in job.events() if one["event"] in ("stalled", "goes_on")]
    assert job.end()[0] == 130


@pytest.mark.parametrize("engine", ["dask", "native"])
def test_a_cluster_that_has_nothing_to_do_is_not_stalled_and_a_stopped_worker_is(start, engine):
    python = ["--python", sys.executable] if engine == "dask" else []
    flags = ("up", "--engine", engine, *python, "--n-workers", "2", "--stalled-after", "5s")
    cluster = start(*flags)
    ready = cluster.until(lambda: cluster.state().get("state") == "ready" and cluster.state())
    time.sleep(10)
    assert not [one for one in cluster.events() if one["event"] == "stalled"]
    os.kill(ready["workers"][0]["pid"], signal.SIGSTOP)
    told = cluster.said("stalled")[0]
    assert told["processes"] == ["gpu0"] and "stopped" in told["text"], told
    os.kill(ready["workers"][0]["pid"], signal.SIGCONT)
    cluster.said("goes_on")
    code, output = cluster.end()
    assert code == 130, output


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--stalled-after", "1s"], "a wait of less than 5s is nothing unusual"),
        (["--end-when-stalled"], "nobody looks whether anything is stalled"),
        (["--stalled-after", "soon"], "soon"),
    ],
)
def test_what_cannot_be_told_is_refused(flags, why):
    said = asked("run", "--simulate", "--topology", "dgx-h100", *flags, "--", "true")
    assert said.returncode == 2 and why in said.stderr, said.stderr
