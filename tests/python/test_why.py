"""What `why` says of jobs in which something is wrong, and of slow ones in which nothing is."""

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

#: The cause that `why` names, and where in the program.
CAUSES = {
    "stopped": ("stopped", "stopped"),
    "other_collective": ("collective", "other_collective"),
    "sleeping": ("sleeps", "sleeping"),
    "own_lock": ("deadlock", "own_lock"),
    "lock_order": ("deadlock", "lock_order"),
    "queue_without_writer": ("deadlock", "queue_without_writer"),
    "pipe_without_reader": ("sleeps", "<module>"),
    "child_that_sleeps": ("sleeps", "<module>"),
    "child_that_is_stopped": ("stopped", "<module>"),
    "loader_that_sleeps": ("sleeps", "loader_that_sleeps"),
    "fork_with_a_lock": ("deadlock", "fork_with_a_lock"),
    "file_lock": ("file_lock", "file_lock"),
    "database_lock": ("file_lock", "database_lock"),
    "pool_that_lost_a_task": ("child", "pool_that_lost_a_task"),
    "silent_server": ("outside", "silent_server"),
    "interpreter_hog": ("interpreter", "hog"),
    "import_lock": ("sleeps", "<module>"),
    "barrier_of_wrong_size": ("deadlock", "barrier_of_wrong_size"),
    "thread_join": ("sleeps", "run"),
    "named_pipe": ("file", "named_pipe"),
    "debugger": ("traced", "debugger"),
    "semaphore_of_a_sleeping_child": ("sleeps", "<lambda>"),
    "queue_of_processes": ("outside", "queue_of_processes"),
    "condition_without_notify": ("deadlock", "condition_without_notify"),
    "pool_that_waits_for_itself": ("deadlock", "pool_that_waits_for_itself"),
    "silent_server_by_select": ("outside", "silent_server_by_select"),
    "event_of_asyncio": ("idle", "event_of_asyncio"),
    "pipes_in_both_directions": ("child", "<module>"),
    # These may end: they are named, and not called stalls.
    "busy": ("works", "busy"),
    "busy_interpreter": ("interpreter", "<lambda>"),
}

#: Jobs that are slow and not stalled.
HEALTHY = [
    "computes",
    "sleeps_between_steps",
    "one_is_slow",
    "writes_files",
    "has_helpers",
    "is_woken_by_a_thread",
    "stops_its_child_for_moments",
]


def python(program, *arguments):
    return [sys.executable, str(STALLS / program), *arguments]


class Job:
    """A job of four ranks, of which rank 2 (`gpu2`) may be the odd one."""

    def __init__(self, name, command, folder):
        self.name = f"why-{name.replace('_', '-')}-{os.getpid()}"
        run = [str(BUILT), "run", "--name", self.name, "--topology", "dgx-h100", "--simulate"]
        environment = {**os.environ, "STALLS_FOLDER": str(folder)}
        self.process = subprocess.Popen(
            [*run, "-n", "4", "--", *command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def why(self, *flags):
        asked = [str(BUILT), "why", self.name, *flags]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)

    def verdict(self):
        said = self.why("-o", "json")
        assert said.stdout, said.stderr
        return said.returncode, json.loads(said.stdout)["verdict"]

    def until(self, standings, cause=None, seconds=90, odd=None):
        """The verdict, when it is one of these, with this cause and these odd ranks; the last one if it never is."""
        end = time.monotonic() + seconds
        code, verdict = None, {"standing": "not asked"}

        def is_told():
            of_them = odd in (None, verdict.get("odd"))
            return verdict["standing"] in standings and cause in (None, verdict.get("cause")) and of_them

        while not is_told() and time.monotonic() < end:
            time.sleep(0.5)
            said = self.why("-o", "json")
            if said.stdout:
                code, verdict = said.returncode, json.loads(said.stdout)["verdict"]
        return code, verdict

    def end(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/{self.name}", ignore_errors=True)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(name, program="causes.py", *arguments):
        jobs.append(Job(name, python(program, *(arguments or (name,))), tmp_path))
        return jobs[-1]

    yield start
    for one in jobs:
        one.end()


@pytest.mark.parametrize("cause", CAUSES)
def test_the_rank_and_the_cause_are_named(job, cause):
    kind, function = CAUSES[cause]
    standing = "waiting" if cause.startswith("busy") else "stalled"
    # While one works, another may still be on its way to where it waits.
    odd = ["gpu2"] if standing == "waiting" else None
    code, verdict = job(cause).until([standing], kind, odd=odd)
    assert (verdict["standing"], verdict.get("cause")) == (standing, kind), verdict
    assert code == (0 if standing == "waiting" else 5)
    assert verdict["odd"] == ["gpu2"], verdict
    place = verdict["groups"][0]["condition"]["place"]
    assert place.split(" in ")[1].split(".")[-1] == function, verdict


def test_two_ranks_that_wait_for_each_other_are_both_named(job):
    _, verdict = job("two_ranks_in_a_circle").until(["stalled"])
    assert verdict["odd"] == ["gpu0", "gpu2"], verdict


@pytest.mark.parametrize("program", HEALTHY)
def test_what_is_only_slow_is_not_stalled(job, program):
    one = job(program, "healthy.py")
    one.until(("working", "waiting"))
    # Whatever the moment is: some of all looks.
    for _ in range(8):
        code, verdict = one.verdict()
        assert code == 0 and verdict["standing"] in ("working", "waiting"), verdict


def test_what_was_seen_is_judged_the_same_elsewhere(job, tmp_path):
    one = job("stopped")
    one.until(["stalled"])
    saved = tmp_path / "seen.json"
    said = one.why("--save", str(saved))
    again = subprocess.run(
        [str(BUILT), "why", "--bundle", str(saved)], capture_output=True, text=True, check=False
    )
    assert (said.returncode, again.returncode) == (5, 5), said.stderr + again.stderr
    assert said.stdout == again.stdout
    assert "gpu2 is stopped by a signal (causes.py:" in said.stdout
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_bundle_is_refused(tmp_path):
    for text, why in [("{", "not what"), ('{"version": 9}', "not what"), ("[]", "not what")]:
        bundle = tmp_path / "bundle.json"
        bundle.write_text(text)
        said = subprocess.run(
            [str(BUILT), "why", "--bundle", str(bundle)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 2 and why in said.stderr, said.stderr
        assert not said.stdout
