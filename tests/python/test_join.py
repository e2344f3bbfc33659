"""A Dask cluster over two hosts, which are networks of this machine: what the host with the scheduler sees
of the other, and how the other ends when it has lost the scheduler."""

import json
import os
import shutil
import subprocess
import sys
import time

import cuda_cluster
import pytest
from conftest import BUILT, RUNTIME
from hosts import another_host, needs_network

pytestmark = [needs_network, pytest.mark.usefixtures("nothing_is_left")]

MACHINE = ["--simulate", "--topology", "dgx-h100", "--engine", "dask", "--python", sys.executable]


def asked(*words):
    return subprocess.run([str(BUILT), *words], capture_output=True, text=True, timeout=120, check=False)


def joined(name):
    """State and reason of each worker that has joined, by its name in its own cluster."""
    said = asked("ps", name, "-o", "json")
    assert said.returncode == 0, said.stderr
    return {
        one["process"]: (one["state"], one.get("reason")) for one in json.loads(said.stdout).get("joined", [])
    }


def until(is_so, seconds=120):
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end
        time.sleep(0.3)
    return found


@pytest.fixture
def two_hosts(monkeypatch):
    """A cluster here, whose workers are joined by two from there; the host and the joined cluster."""
    # A connection on which nothing arrives any more breaks after that.
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP", "12s")
    home, guests = (f"{name}-{os.getpid()}" for name in ("home", "guests"))
    with another_host() as host:
        up = asked("up", "--detach", "--name", home, *MACHINE, "--gpus", "0", "--host", host.here)
        assert up.returncode == 0, up.stderr
        scheduler = json.loads(asked("ps", home, "-o", "json").stdout)["scheduler"]["address"]
        command = [str(BUILT), "up", "--name", guests, *MACHINE, "--gpus", "1-2"]
        command += ["--join", scheduler, "--host", host.there, "--ready-within", "5m"]
        process = subprocess.Popen(
            host.command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield host, home, guests, process, scheduler
        finally:
            if process.returncode is None:
                process.terminate()
                process.communicate(timeout=60)
            asked("down", home)
            for name in (home, guests):
                shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}", ignore_errors=True)


READY = {"gpu1": ("ready", None), "gpu2": ("ready", None)}
LOST = {"gpu1": ("lost", "its connection broke"), "gpu2": ("lost", "its connection broke")}


def test_a_host_that_is_lost_is_seen_to_be_and_back_when_it_is(two_hosts):
    host, home, guests, process, scheduler = two_hosts
    until(lambda: joined(home) == READY)
    host.set("down")
    until(lambda: joined(home) == LOST)
    host.set("up")
    until(lambda: joined(home) == READY)
    events = asked("events", home).stdout
    assert events.count("has joined") == 4, events
    state = cuda_cluster.attach(home).state()
    assert [(one.cluster, one.process, one.gpu, one.state) for one in sorted(state.joined, key=lambda it: it.name)] == [
        (guests, "gpu1", 1, "ready"), (guests, "gpu2", 2, "ready"),
    ]  # fmt: skip
    assert events.count("is lost: its connection broke") == 2, events
    assert process.poll() is None, "it goes on"
    # Nobody comes back any more.
    host.set("down")
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 6, output
    lost = f"the scheduler that its workers had joined is lost: no scheduler at {scheduler} within 30 s"
    assert lost in output
    assert lost in asked("ps", "-a", guests).stdout
    until(lambda: joined(home) == LOST)


def test_an_orderly_end_of_the_scheduler_is_one_of_those_who_joined_and_is_kept(two_hosts):
    _, home, guests, process, scheduler = two_hosts
    until(lambda: joined(home) == READY)
    assert asked("down", home).returncode == 0
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    ended = asked("ps", "-a", guests).stdout
    assert "stopped at " in ended, ended
    assert f"its workers are not wanted any more: the scheduler at {scheduler} ended" in ended
