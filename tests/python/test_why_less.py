"""What `why` says where it may not look into other processes, and what the kernel's messages add."""

import json
import os
import shutil
import subprocess
import time

import pytest
from conftest import BUILT
from test_why import Job, python

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SETPRIV = shutil.which("setpriv")

#: Who may do nothing that another user may not.
WITHOUT = "-sys_ptrace,-sys_admin,-perfmon,-syslog,-dac_override,-dac_read_search"


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(cause):
        jobs.append(Job(cause, python("causes.py", cause), tmp_path))
        return jobs[-1]

    yield start
    for one in jobs:
        one.end()


def without_ptrace(*words):
    """Runs `why` without the capabilities by which root looks into processes."""
    less = [SETPRIV, f"--bounding-set={WITHOUT}", f"--inh-caps={WITHOUT}"]
    return subprocess.run([*less, str(BUILT), *words], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(SETPRIV is None or os.geteuid() != 0, reason="needs root and setpriv")
def test_without_ptrace_what_needs_none_is_told_and_the_rest_is_named(job):
    one = job("stopped")
    one.until(["stalled"], "stopped")
    said = without_ptrace("why", one.name, "-o", "json")
    told = json.loads(said.stdout)
    verdict, unseen = told["verdict"], told["evidence"].get("unseen", [])
    # That a process is stopped, and since when, anybody may see.
    assert (said.returncode, verdict["cause"], verdict["odd"]) == (5, "stopped", ["gpu2"]), verdict
    assert all(process["threads"] for process in told["evidence"]["processes"])
    whats = " ".join(one["what"] for one in unseen)
    assert "system calls of process" in whats and "Python's stacks of process" in whats, unseen
    assert all(one["why"] for one in unseen)
    text = without_ptrace("why", one.name).stdout
    assert "not seen: Python's stacks of process" in " ".join(text.split())


def test_what_the_kernel_has_said_of_a_rank_since_it_began_is_told(job, tmp_path, monkeypatch):
    one = job("own_lock")
    one.until(["stalled"])
    told = json.loads(one.why("-o", "json").stdout)
    pid = next(rank["pid"] for rank in told["evidence"]["ranks"] if rank["name"] == "gpu1")
    now, text = int(time.monotonic() * 1e6), "blocked for more than 122 seconds."
    lines = [
        f"3,1,{now - 40_000_000_000},-;INFO: task old:{pid} {text}",
        f"3,2,{now},-;INFO: task python3:{pid} {text}",
        f"3,3,{now},-;INFO: task other:1 {text}",
        f"6,4,{now},-;Out of memory: Killed process {pid} (python3) total-vm:1kB",
    ]
    (tmp_path / "kmsg").write_text("\n".join([*lines, ""]))
    monkeypatch.setenv("CUDA_CLUSTER_KMSG", str(tmp_path / "kmsg"))
    told = json.loads(one.why("-o", "json").stdout)
    said = told["verdict"]["text"]
    assert told["verdict"]["odd"] == ["gpu2"], said
    assert f"thread {pid} (python3) of gpu1 had been blocked for more than 122 s" in said
    assert f"killed process {pid} (python3) of gpu1, because the memory had run out" in said
    assert "(other)" not in said and "(old)" not in said
    monkeypatch.setenv("CUDA_CLUSTER_KMSG", str(tmp_path / "missing"))
    monkeypatch.setenv("PATH", str(tmp_path))
    told = json.loads(one.why("-o", "json").stdout)
    unseen = {one["what"]: one["why"] for one in told["evidence"].get("unseen", [])}
    assert "No such file" in unseen["the kernel's messages"]
    assert told["verdict"]["odd"] == ["gpu2"]
